"""Loading a stream of weights into a running vLLM model, so that all of it arrives or the culprit
is named.

Two ways, decided by module: in place through `model.load_weights`, recorded and replayed, where
parameters still have the checkpoint's layout; or, where vLLM has changed them after loading (packed
for oneDNN on CPU, experts shuffled, quantised, products of MLA's weights), through vLLM's layerwise
reload (vllm/model_executor/model_loader/reload/layerwise.py), with remedies for what it leaves
stale or unset.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import linear
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from sharding.wire.channel import SyncError
from sharding.wire.low_rank import Factors
from sharding.wire.manifest import Manifest, NamedTensors, Part, checkpoint_manifest, first_names
from sharding.worker.gpt_oss import has_own_loop, through_loaders
from sharding.worker.recording import (
    LoadWatcher,
    Recording,
    overlaps,
    parameter_storages,
    same_bits,
    storage_key,
)

_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}

# Kernels that compute with experts as they are loaded (`convert_to_unquantized_kernel_format` in
# vllm/model_executor/layers/fused_moe/oracle/unquantized.py), besides ours; all others shuffle
# them.
_PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON"}


def reprocessed_modules(model: Module, plain_on_cpu: bool) -> list[Module]:
    """Return the outermost modules that cannot be written in place, or read back; the model itself
    where oneDNN packs it.
    `plain_on_cpu`: packing was switched off before the model was built (`sharding.worker.cpu`).
    """
    if not plain_on_cpu and next(model.parameters()).device.type == "cpu":
        return [model]
    outermost: list[Module] = []
    inside: set[Module] = set()
    for module in model.modules():  # from the outside in
        method = getattr(module, "quant_method", None)
        packs = method is not None and not _keeps(method)
        products = hasattr(module, "W_UK_T") or hasattr(module, "W_UV")  # of MLA's weights
        if module not in inside and (packs or products):
            outermost.append(module)
            inside.update(module.modules())
    return outermost


def _keeps(method: Any) -> bool:
    """Return True if a module's weights stay as they are loaded."""
    if type(method).__name__ == "UnquantizedFusedMoEMethod":
        plain = getattr(getattr(method, "experts_cls", None), "keeps_weights", False)
        return plain or method.unquantized_backend.name in _PLAIN_EXPERTS
    return type(method).__name__ in _PLAIN_METHODS


def check_unpacked(model: Module, reprocessed: Sequence[Module]) -> None:
    """Raise SyncError for a packed weight outside of the modules `reprocessed`: one that was to be
    written in place.

    vLLM notes a kernel that computes from a packed copy at the layer
    (vllm/model_executor/layers/utils.py).
    """
    inside = {inner for module in reprocessed for inner in module.modules()}
    for name, module in model.named_modules():
        packed = getattr(module, "cpu_linear", linear) is not linear or hasattr(
            module, "_cpu_unpacked_conv_weight"
        )
        if packed and module not in inside:
            raise SyncError(
                f"{name}.weight is packed by this vLLM for this machine's CPU, although "
                "engine.plain_cpu_weights is true, so that an update cannot be written into it: set "
                "engine.plain_cpu_weights to false"
            )


class Reload:
    """One layerwise reload of some modules of a model, which keeps the weights it is given until
    they are complete.
    """

    def __init__(self, model: Module, modules: list[Module], config: VllmConfig) -> None:
        self._model = model
        self._modules = modules
        self._config = config
        self._begun = False

    def begin(self) -> None:
        """Move the parameters to meta, where they stay until all weights of a module have
        arrived.
        """
        if not self._modules:
            return
        if next(self._model.parameters()).device.type == "cpu":
            for _, module in self._named():
                method = getattr(module, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    # Else it is not packed from the second load on (`_setup_kernel` in
                    # vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py).
                    method.moe_kernel = None  # type: ignore[union-attr]
        for parameter in self.parameters():
            if isinstance(loader := getattr(parameter, "weight_loader", None), partial):
                loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]  # layerwise.py asks for it
        with set_current_vllm_config(self._config):
            for module in self._modules:
                initialize_layerwise_reload(module)
        self._begun = True

    def finish(self) -> None:
        """Load the weights that waited for others, and restore parameters that got none, so that
        none stays on meta.
        """
        if not self._begun:
            return
        self._begun = False
        with set_current_vllm_config(self._config):
            for module in self._modules:
                finalize_layerwise_reload(module, self._config.model_config)
            _repack_tied([module for _, module in self._named()])

    def parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters of these modules, as they are now."""
        return {parameter for module in self._modules for parameter in module.parameters()}

    def untouched(self) -> list[str]:
        """Return the modules that no weight was sent for, unless they share parameters with a
        loaded one (tied).
        """
        missing: dict[str, set[int]] = {}
        loaded: set[int] = set()
        for name, module in self._named():
            info = get_layerwise_info(module)
            parameters = info.kernel_tensors[0] if info.kernel_tensors else module._parameters
            ids = {id(p) for p in parameters.values() if p is not None}
            if not info.can_load() or info.load_numel > 0:
                loaded |= ids
            elif info.load_numel_total and info.restore_metadata[0]:
                # MLA's attention keeps only products
                missing[name] = ids
        # A module without parameters misses nothing.
        return [name for name, ids in missing.items() if not ids <= loaded]

    def _named(self) -> list[tuple[str, Module]]:
        inside = {inner for module in self._modules for inner in module.modules()}
        return [(name, module) for name, module in self._model.named_modules() if module in inside]


def _repack_tied(modules: list[Any]) -> None:
    """Repack the weight of each module that shares it with an earlier one: on CPU a tied head keeps
    a packed copy (vllm/model_executor/layers/vocab_parallel_embedding.py,
    process_weights_after_loading).
    """
    owners: dict[int, Module] = {}
    for module in modules:
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel() and owners.setdefault(id(weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)


class Arrivals:
    """The announced weights of an update, checked off as they arrive."""

    def __init__(self, expected: Manifest) -> None:
        self._expected = expected
        self._arrived: set[str] = set()
        # For weights that come in parts, the elements of each part, in order.
        self._parts: dict[str, list[tuple[int, int]]] = {}

    def check_off(self, weights: NamedTensors) -> None:
        """Raise SyncError for a weight that was not announced as it is, or that came before."""
        if unknown := sorted({name for name, _ in weights} - self._expected.keys()):
            raise SyncError(f"weights arrived that were not announced: {first_names(unknown)}")
        for name, tensor in weights:
            if name in self._arrived or name in self._parts:
                raise SyncError(f"{name} arrived a second time")
            self._arrived.add(name)
            form = [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            if form != self._expected[name]:
                raise SyncError(f"{name} arrived as {form} and was announced as {self._expected[name]}")

    def check_off_shared(self, names: list[str]) -> None:
        """Note that these weights need not be sent."""
        self._arrived.update(names)

    def check_off_parts(self, parts: list[Part], cast: bool = False) -> None:
        """Check off parts of weights, as `check_off` does whole ones; with `cast`, in any dtype."""
        for name, first, values in parts:
            if name not in self._expected:
                raise SyncError(f"a part of a weight arrived that was not announced: {name}")
            shape, dtype = self._expected[name]
            last = first + values.numel()
            elements = math.prod(shape)
            if not 0 <= first < last <= elements or not (cast or str(values.dtype) == f"torch.{dtype}"):
                was = f"{elements} of torch.{dtype} were announced"
                raise SyncError(
                    f"elements {first} to {last} of {name} arrived as {values.dtype}, and {was}"
                )
            if name in self._arrived or overlaps(self._parts.setdefault(name, []), first, last):
                raise SyncError(f"elements {first} to {last} of {name} arrived a second time")
            bisect.insort(self._parts[name], (first, last))

    def is_like(self, name: str, manifest: Manifest) -> bool:
        """Return True if a weight was announced in the shape that it has in this manifest."""
        return name in manifest and manifest[name][0] == self._expected[name][0]

    def missing(self) -> list[str]:
        """Return the weights of which nothing has arrived."""
        return sorted(self._expected.keys() - self._arrived - self._parts.keys())

    def unread(self, read: set[str]) -> list[str]:
        """Return the weights that arrived but are not among the ones that the engine has `read`."""
        return sorted((self._arrived | self._parts.keys()) - read)

    def complaints(self, read: set[str]) -> list[str]:
        """Return the weights that did not arrive, and those that did but are not among the ones
        that the engine has `read`.
        """
        complaints = []
        for name, ranges in self._parts.items():
            arrived = sum(last - first for first, last in ranges)
            elements = math.prod(self._expected[name][0])
            if arrived < elements:
                complaints.append(f"only {arrived} of {elements} elements of {name} were sent")
        if lost := self.missing():
            complaints.append(f"announced but never sent: {first_names(lost)}")
        if unread := self.unread(read):
            complaints.append(f"sent but read by no part of the engine's model: {first_names(unread)}")
        return complaints


class WeightLoader:
    """One update of one worker's model: `load` per bucket, then `finish`; or `abort`, after which
    it can be loaded. `plain`: every module is written in place. `recording`: the loaders' copies in
    this update or an earlier one; None where nothing is recorded. `left_out`: the weights that the
    model does without on purpose, known after `finish`. `arrivals`: those that came.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        reprocessed: Sequence[torch.nn.Module] = (),
        recording: Recording | None = None,
    ) -> None:
        """Begin an update of `model`. `reprocessed`: the modules whose weights cannot be written in
        place, since vLLM re-processes them.
        """
        self.plain = not reprocessed
        self.recording = recording
        self.left_out: list[str] = []
        self._model = model
        self._config = vllm_config
        self._reprocessed = list(reprocessed)
        self._reload = Reload(model, self._reprocessed, vllm_config)
        self._watcher = LoadWatcher()
        self.arrivals = Arrivals({})

    def begin(self, weights: Manifest, replay: bool = True) -> None:
        """Start an update that will bring exactly these weights; `replay` records the loaders'
        copies, or repeats them. Weights that are re-processed after loading cannot be replayed.
        Raises SyncError: as `check_unpacked`.
        """
        check_unpacked(self._model, self._reprocessed)
        self.arrivals = Arrivals(weights)
        if self._model in self._reprocessed or not replay:
            self.recording = None
        elif self.recording is None or not self.recording.fits(self._model, weights):
            self.recording = self._watcher.recording = Recording(
                weights, parameter_storages(self._model)
            )
        self._reload.begin()

    def take_in_place(self) -> None:
        """Note that the announced weights are in the model already, except `Recording.sent_apart`
        ones. Its parameters are then the trainer's (`SharedWeights`). Raises SyncError: they are no
        longer in the memory that was shared.
        """
        if self.recording is None or not self.recording.complete:
            raise SyncError(
                f"{type(self._model).__name__} has other parameters, or is sent other weights, than "
                "when its memory was shared with the trainer"
            )
        shared = [name for name in self.recording.weights if not self.recording.sent_apart(name)]
        self.arrivals.check_off_shared(shared)
        for name in shared:
            self._watcher.note_replayed(name, self.recording.targets(name))

    def load(self, weights: NamedTensors) -> None:
        """Load some of the announced weights. When it returns, their memory may be overwritten.
        Raises SyncError: a weight that was not announced as it is, that came before, or that the
        model refuses.
        """
        self.arrivals.check_off(weights)
        if self.recording is not None and self.recording.complete:  # what can be copied needs no loaders
            ready = [pair for pair in weights if self.recording.replayable(pair[0])]
            self.recording.replay(ready)
            for name, _ in ready:
                self._watcher.note_replayed(name, self.recording.targets(name))
            weights = [pair for pair in weights if not self.recording.replayable(pair[0])]
        if not self.plain:
            weights = copy_of(weights)  # a reload keeps references until a fused module is complete
        self._run_loaders(weights)
        if self.recording is not None and not self.recording.complete:
            self._try_out(self.recording, weights)

    def load_parts(self, parts: list[Part]) -> None:
        """Load parts of weights, as `load`; of those that `whole` does not name.
        Raises SyncError: as `load` does; or a weight has to come whole.
        """
        self.arrivals.check_off_parts(parts)
        self._replay_parts(parts)

    def pull(self, parts: list[Part], added: dict[str, Callable[[], Factors]]) -> int:
        """Load parts, as `load_parts` does, from memory that has them in any dtype. Return their
        bytes in the model's dtype. `added`: weights of which parts of W come, and W + scale · B A
        is wanted, in the order of `parts`.
        """
        self.arrivals.check_off_parts(parts, cast=True)
        nbytes = self._replay_parts([part for part in parts if part[0] not in added])
        for name, some in groupby((part for part in parts if part[0] in added), key=itemgetter(0)):
            factors = added[name]()
            nbytes += sum(self._add(part, factors) for part in some)
        return nbytes

    def _add(self, part: Part, factors: Factors) -> int:
        """Load a part of a weight with its addition; returns its bytes in the model's dtype."""
        name, offset, values = part
        loaded = [self._replay_parts([(name, offset, values[:0])])]  # a worker may need nothing of it
        assert self.recording is not None

        def take(first: int, sums: torch.Tensor) -> None:
            loaded.append(self._replay_parts([(name, first, sums)]))

        factors.add(values, offset, take, partial(self.recording.reads, name))
        return sum(loaded)

    def _replay_parts(self, parts: list[Part]) -> int:
        recording = self.recording
        for name, _, _ in parts:
            if recording is None or not recording.complete or not recording.replayable(name):
                raise SyncError(f"{name} arrived in parts, and its loader needs it whole")
        assert recording is not None
        nbytes = 0
        for (name, _, _), targets in zip(parts, recording.replay_parts(parts), strict=True):
            self._watcher.note_replayed(name, targets)
            nbytes += sum(target.nbytes for target in targets)
        return nbytes

    def whole(self) -> list[str] | None:
        """Return the weights of this update that cannot come in parts, since their loaders need
        them; None: all.
        """
        recording = self.recording
        if recording is None or not recording.complete:
            return None
        return [name for name in recording.weights if not recording.replayable(name)]

    def _try_out(self, recording: Recording, weights: NamedTensors) -> None:
        """Replay the new recording into zeroed parameters, and compare by the loaders."""
        ready = [pair for pair in weights if recording.replayable(pair[0])]
        for target in (target for name, _ in ready for target in recording.targets(name)):
            target.zero_()
        recording.replay(ready)
        if different := set(self.compare(ready)):
            recording.distrust(different, "replayed, it is not what its loader makes of it")
            self._run_loaders([pair for pair in ready if pair[0] in different])

    def compare(self, weights: NamedTensors) -> list[str]:
        """Return the weights that differ from those in the model, as its own loaders find. Only
        where `plain`.
        """
        changed = self._watcher.changed
        self._watcher.comparing = True
        try:
            self._run_loaders([pair for pair in weights if pair[0] not in changed])
        finally:
            self._watcher.comparing = False
        different = self._watcher.different
        self._watcher.different = set()
        return sorted(
            different | self._compare_changed([pair for pair in weights if pair[0] in changed])
        )

    def _compare_changed(self, weights: NamedTensors) -> set[str]:
        """Return the weights for which loaders that change them would now make another value than
        the model's.
        The loaders run once more in the model's own memory, which is put back afterwards.
        """
        names = {name for name, _ in weights}
        sources = {p: names.intersection(self._watcher.sources(p)) for p in self._model.parameters()}
        held = {parameter: parameter.detach().clone() for parameter, some in sources.items() if some}
        self._run_loaders(weights)
        different: set[str] = set()
        for parameter, values in held.items():
            if not same_bits(parameter, values):
                different |= sources[parameter]
            parameter.detach().copy_(values)
        return different

    def _run_loaders(self, weights: NamedTensors) -> None:
        if not weights:
            return
        self._watcher.expect(weights)
        ready = through_loaders(self._model, weights) if has_own_loop(self._model) else iter(weights)
        try:
            with set_current_vllm_config(self._config), self._watcher:
                self._model.load_weights(ready)  # type: ignore[operator]
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            names = [name for name, _ in weights]
            refused = [n for n in names if n not in self._watcher.read]
            raise SyncError(
                f"the engine's model {type(self._model).__name__} refused a weight, "
                f"one of {first_names(refused or names)}: {error}"
            ) from error

    def finish(self) -> None:
        """End the update: post-process where needed and account for every weight. Raises SyncError:
        naming announced weights that nothing read, and parameters that were not written in full.
        """
        if self.recording is not None and self.recording.complete:
            with self._watcher:
                self.recording.refill()
        elif self.recording is not None:
            self.recording.check(complete=self._config.parallel_config.tensor_parallel_size == 1)
        self._leave_out(self.arrivals.unread(self._watcher.read))
        elsewhere = self._reload.parameters()
        written = self._watcher.written
        untouched = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.numel() and parameter not in elsewhere and storage_key(parameter) not in written
        ]
        untouched += self._reload.untouched()
        with self._watcher:
            # Modules with padding, such as a vocabulary of odd size, are loaded only now
            self._reload.finish()
        complaints = self.arrivals.complaints(self._watcher.read.union(self.left_out))
        if untouched:
            complaints.append(
                f"never sent, so the engine would keep old values: {first_names(untouched)}"
            )
        for entry in self._watcher.written.values():
            if entry.written < entry.elements:
                complaints.append(
                    f"a parameter of {entry.elements} elements got only {entry.written}, from "
                    f"{first_names(entry.sources)}: its other parts were not sent"
                )
        if complaints:
            raise SyncError(
                f"{type(self._model).__name__} is not completely updated: " + "; ".join(complaints)
            )

    def _leave_out(self, unread: list[str]) -> None:
        """Note the weights that vLLM leaves out on purpose: unread ones of the engine's own
        checkpoint. An encoder's layers behind the one whose features are used are such
        (vllm/model_executor/models/clip.py).
        """
        with suppress(SyncError, OSError, ValueError):  # the checkpoint may not be on this machine
            manifest = own_checkpoint(self._config.model_config) if unread else {}
            self.left_out = [name for name in unread if self.arrivals.is_like(name, manifest)]
        if self.recording is not None:
            self.left_out = self.recording.leave_out(self.left_out)

    def unreplayable(self) -> dict[str, str] | None:
        """Return the weights that cannot be replayed, with the reasons; None where nothing is
        recorded.
        """
        return None if self.recording is None else self.recording.unreplayable

    def abort(self) -> None:
        """Give up this update; the next complete one repairs the values."""
        with self._watcher:
            self._reload.finish()


def own_checkpoint(config: ModelConfig) -> Manifest:
    """Return the manifest of the checkpoint that an engine was started from. See
    `checkpoint_manifest`.
    """
    tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
    return checkpoint_manifest(config.model, str(config.dtype).removeprefix("torch."), tied)


def copy_of(weights: NamedTensors) -> NamedTensors:
    """Return copies of the weights."""
    return [(name, tensor.clone()) for name, tensor in weights]
