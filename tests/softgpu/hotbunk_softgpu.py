"""Installs the GPU in software in each process of its environment, as Python starts (environment.sh).

Loads its libraries, and, as soon as torch is there, has torch's operations for CUDA computed on the CPU (src/ops.cpp).
"""

import ctypes
import datetime
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

LIBRARIES = f"{sys.prefix}/softgpu"

ENGINE = {
    "attention_config": {"backend": "TRITON_ATTN"},
    "compilation_config": {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": "NONE"},
    "kernel_config": {
        "enable_jit_warmup": False,
        "enable_flashinfer_autotune": False,
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    },
    "disable_custom_all_reduce": True,
    "enforce_eager": True,
}
"""Arguments of vLLM's with which its engine asks for no compiled kernel."""

libraries: list[Any] = []  # what goes with its last reference


def after_torch(torch: ModuleType) -> None:
    """Replace the kernels of CUDA's operations."""
    with_quiet_stderr(lambda: torch.ops.load_library(f"{LIBRARIES}/libsoftgpu_ops.so"))
    for kind in ("flash", "mem_efficient", "cudnn"):  # leaves the one that is made of plain operations
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    torch.backends.cuda.enable_cudnn_sdp = lambda _: None
    torch.backends.cudnn.enabled = False  # for convolutions
    library = torch.library.Library("aten", "IMPL", "CUDA")
    libraries.append(library)
    add_wide_products(library)
    add_flash_attention(library)


def with_quiet_stderr(action: Callable[[], object]) -> None:
    """Call it without what torch's dispatcher says of every kernel that is replaced."""
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        action()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def add_wide_products(library: Any) -> None:
    """Products of narrow matrices with a wider result, which the CPU does not have."""

    def mm(a, b, dtype):
        return (a.float() @ b.float()).to(dtype)

    def addmm(c, a, b, dtype, *, beta=1, alpha=1):
        if c.dtype not in (dtype, a.dtype):
            raise RuntimeError("self dtype must match either out_dtype or mat1 dtype")
        return (beta * c.float() + alpha * (a.float() @ b.float())).to(dtype)

    library.impl("mm.dtype", mm)
    library.impl("bmm.dtype", mm)
    library.impl("mm.dtype_out", lambda a, b, dtype, *, out: out.copy_(mm(a, b, dtype)))
    library.impl("addmm.dtype", addmm)
    library.impl(
        "addmm.dtype_out",
        lambda c, a, b, dtype, *, out, **scales: out.copy_(addmm(c, a, b, dtype, **scales)),
    )


def attention_scores(q, k, scale: float, causal: bool, left: int | None, right: int | None):
    """Score [heads, rows, columns] of [heads, tokens, size]; the last row sees the last column."""
    import torch

    scores = (q @ k.transpose(1, 2)) * scale
    rows, columns = scores.shape[1:]
    distance = (
        torch.arange(rows, device=q.device)[:, None]
        + columns
        - rows
        - torch.arange(columns, device=q.device)
    )
    left, right = -1 if left is None else left, 0 if causal else -1 if right is None else right
    hidden = torch.zeros(rows, columns, dtype=torch.bool, device=q.device)
    if right >= 0:
        hidden |= distance < -right
    if left >= 0:
        hidden |= distance > left
    return scores.masked_fill(hidden, float("-inf"))


def add_flash_attention(library: Any) -> None:
    """FlashAttention over packed sequences in plain operations, with what it refuses."""
    import torch

    def pieces(cu_q, cu_k):
        q, k = cu_q.tolist(), (cu_q if cu_k is None else cu_k).tolist()
        return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False)]

    def host(t, piece, heads):
        t = t[piece].cpu().float().transpose(0, 1)
        return t.repeat_interleave(heads // t.shape[0], 0)

    def check(q, k, v, cu_q):
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if cu_q.dtype != torch.int32 or not cu_q.is_cuda:
            raise RuntimeError("cu_seqlens_q must have dtype int32 and be on CUDA")
        if any(t.stride(-1) != 1 for t in (q, k, v)):
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if q.shape[-1] % 8 or q.shape[-1] > 256 or q.shape[1] % k.shape[1]:
            raise RuntimeError("head sizes or numbers of heads are not taken")

    def forward(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        debug,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
        seqused_k=None,
        alibi_slopes=None,
        block_table=None,
        num_splits=None,
    ):
        check(q, k, v, cu_q)
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], device=q.device)
        heads, scale = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
        for sq, sk in pieces(cu_q, cu_k):
            scores = attention_scores(
                host(q, sq, heads),
                host(k, sk, heads),
                scale,
                causal,
                window_size_left,
                window_size_right,
            )
            out[sq] = (scores.softmax(-1) @ host(v, sk, heads)).transpose(0, 1).to(q.dtype).to(q.device)
            lse[:, sq] = scores.logsumexp(-1).to(q.device)
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        return out, lse, seed, unused, torch.empty(0, dtype=q.dtype, device=q.device)

    def backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        rng,
        unused,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
    ):
        check(q, k, v, cu_q)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        sum_groups = lambda t: t.unflatten(0, (-1, group)).sum(1).transpose(0, 1)  # noqa: E731
        for sq, sk in pieces(cu_q, cu_k):
            hq, hk, hv, g = (
                host(q, sq, heads),
                host(k, sk, heads),
                host(v, sk, heads),
                host(grad, sq, heads),
            )
            p = attention_scores(hq, hk, scale, causal, window_size_left, window_size_right).softmax(-1)
            dp = g @ hv.transpose(1, 2)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
            dq[sq] = (ds @ hk).transpose(0, 1).to(q.dtype).to(q.device)
            dk[sk] = sum_groups(ds.transpose(1, 2) @ hq).to(k.dtype).to(q.device)
            dv[sk] = sum_groups(p.transpose(1, 2) @ g).to(v.dtype).to(q.device)
        return dq, dk, dv

    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)


def after_triton_interpreter(module: ModuleType) -> None:
    """Triton's interpreter copies tensors to the host and back; here they are there. A kernel waits for its turn."""
    import torch

    runtime = ctypes.CDLL("libcudart.so.13")

    def arguments(_: object, args: Any, kwargs: Any) -> Any:
        if error := runtime.sg_launch(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)):
            torch.cuda.check_error(error)
        return list(args), kwargs

    module.GridExecutor._init_args_hst = arguments
    module.GridExecutor._restore_args_dev = lambda *_: None
    patch, patched = module._patch_lang, set()

    def patch_once(kernel: Any) -> Any:
        """Leave triton.language as the interpreter wants it: to change it for each call costs more than the call."""
        languages = frozenset(
            id(x) for x in kernel.__globals__.values() if x is module.tl or x is module.tl.core
        )
        if languages not in patched:
            patched.add(languages)
            patch(kernel)
        return module._LangPatchScope()

    module._patch_lang = patch_once


def after_triton_attention(module: ModuleType) -> None:
    """vLLM's attention in plain operations: the interpreter of Triton 3.7 gets products of bfloat16 wrong.

    In float64, as float32's last bit depends on how much of a prompt is in the cache already, and thus on time.
    """

    def write_cache(key, value, key_cache, value_cache, slots, *_):
        block = key_cache.shape[1]
        used = slots >= 0
        slots, count = slots[used], len(slots)
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache[slots // block, slots % block] = new[:count][used].to(cache.dtype)

    def attention(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        block_table,
        softcap,
        *_,
        **__,
    ):
        starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
        for row, (begin, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            if end <= begin or length <= 0:
                continue
            blocks = block_table[row, : -(-length // k.shape[1])].long()
            keys, values = (x[blocks].flatten(0, 1)[:length].double().transpose(0, 1) for x in (k, v))
            queries = q[begin:end].double().transpose(0, 1)  # [heads, tokens, size]
            group = queries.shape[0] // keys.shape[0]
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            scores = attention_scores(queries, keys, softmax_scale, True, window_size[0], 0)
            if softcap:
                scores = softcap * (scores / softcap).tanh().masked_fill(scores.isinf(), float("-inf"))
            out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)

    module.triton_reshape_and_cache_flash, module.unified_attention = write_cache, attention


def after_gumbel(module: ModuleType) -> None:
    """vLLM's sampling in plain operations, with other random numbers: most of a rollout was the interpreter's."""
    import torch

    def gumbel_sample(logits, mapping, temperature, seed, pos, apply_temperature, *_, **__):
        rows = mapping.long().clamp(min=0)
        heat = torch.where(mapping >= 0, temperature[rows].float(), 0.0)[:, None]
        keys = (seed[rows] * 1000003 + pos)[:, None] * 1000003 + torch.arange(
            logits.shape[1], device=logits.device
        )
        for factor in (0x7FB5D329728EA185, 0x1B873593CC9E2D51, 0x2545F4914F6CDD1D):
            keys = (keys ^ (keys >> 27)) * factor
        noise = -(-((keys >> 40 & 0xFFFFFF) + 0.5).div(1 << 24).log()).log()
        scaled = (
            logits.float() / torch.where(heat > 0, heat, 1.0) if apply_temperature else logits.float()
        )
        return (scaled + noise * (heat > 0)).argmax(-1)

    module.gumbel_sample = gumbel_sample


def after_adapters(module: ModuleType) -> None:
    """vLLM's products with adapters in plain operations: a step took the interpreter minutes."""

    def rows_by_adapter(mapping):
        return [(number, mapping == number) for number in sorted(set(mapping.tolist()) - {-1})]

    def shrink(inputs, weights, out, mapping, *others):
        out.zero_()
        for number, rows in rows_by_adapter(mapping):
            for piece, weight in zip(out, weights, strict=True):
                piece[rows] = others[-1] * (
                    inputs[rows].float() @ weight[number].flatten(0, -2).float().T
                )

    def expand(inputs, weights, out, mapping, *_, offset_start=0, add_inputs=False):
        for number, rows in rows_by_adapter(mapping):
            begin = offset_start
            for piece, weight in zip(inputs, weights, strict=True):
                product = piece[rows] @ weight[number].flatten(0, -2).float().T
                columns = out[:, begin : (begin := begin + product.shape[1])]
                columns[rows] = (columns[rows].float() * add_inputs + product).to(out.dtype)

    module.lora_shrink, module.lora_expand = shrink, expand


def after_c10d(module: ModuleType) -> None:
    """NCCL's groups are Gloo's, which take CUDA tensors: NCCL's own collectives are kernels."""

    class Options:
        _timeout = datetime.timedelta(minutes=10)
        is_high_priority_stream = False
        global_ranks_in_group = ()
        group_name = ""

        def __init__(self, *_: object, **__: object) -> None:
            self.config = type("config", (), {})()

    class ProcessGroupNCCL(module.ProcessGroupGloo):
        def __init__(self, store, rank, size, options=None):
            super().__init__(store, rank, size, (options or Options)._timeout)

    ProcessGroupNCCL.Options = Options
    module.ProcessGroupNCCL = ProcessGroupNCCL


def after_vllm_compat(module: ModuleType) -> None:
    """Hotbunk's engines are started with the arguments above."""
    make = module.engine_arguments

    def engine_arguments(settings: Any) -> dict[str, Any]:
        arguments = make(settings)
        if settings.on_cpu:
            return arguments
        # few, as Triton's kernels are interpreted, program by program
        tokens = max(64, arguments["max_num_seqs"])
        return arguments | ENGINE | {"max_num_batched_tokens": tokens}

    module.engine_arguments = engine_arguments


def after_embedding(module: ModuleType) -> None:
    """vLLM's embedding of several devices in plain operations, rather than its kernel."""
    module.VocabParallelEmbedding.use_fused_embedding = property(lambda _: False, lambda *_: None)


def after_engine_thread(module: ModuleType) -> None:
    """Everything is slower than tests expect of a GPU, on a busy machine above all."""
    run = module.EngineThread.run
    module.EngineThread.run = lambda self, call, timeout, what: run(self, call, 5 * timeout, what)


def after_extension(module: ModuleType) -> None:
    """A test may evaluate an expression in a module in the engine's worker."""

    def softgpu(_: object, name: str, code: str) -> dict[str, Any]:
        return {"error": None, "value": eval(code, vars(importlib.import_module(name)))}

    module.VllmInternalWorkerExtension.softgpu = softgpu


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "torch": after_torch,
    "torch.distributed.distributed_c10d": after_c10d,
    "triton.runtime.interpreter": after_triton_interpreter,
    "vllm.lora.punica_wrapper.punica_gpu": after_adapters,
    "vllm.model_executor.layers.vocab_parallel_embedding": after_embedding,
    "vllm.v1.attention.backends.triton_attn": after_triton_attention,
    "vllm.v1.worker.gpu.sample.gumbel": after_gumbel,
    "generation.engine.vllm_compat": after_vllm_compat,
    "generation.engine.thread": after_engine_thread,
    "sharding.worker.extension": after_extension,
}
"""What is done as soon as a module has been imported."""


class Finder(importlib.abc.MetaPathFinder):
    """Calls a module's hook when that has been imported."""

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook = HOOKS.pop(name, None)
            if hook:
                hook(module)

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """At each start of Python. SOFTGPU_OFF leaves this process without a GPU."""
    if not os.path.exists(f"{LIBRARIES}/libsoftgpu_ops.so"):
        return
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        # whoever asks for them by name gets those that are loaded
        libraries.append(ctypes.CDLL(f"{LIBRARIES}/{name}", mode=ctypes.RTLD_GLOBAL))
    if "SOFTGPU_OFF" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    # vLLM's tensor parallelism asks torch's groups, which are Gloo's, rather than NCCL and kernels of its own.
    off = dict.fromkeys(("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"), "0")
    on = dict.fromkeys(
        (
            "TRITON_INTERPRET",
            "TORCHDYNAMO_DISABLE",
            "VLLM_DISABLE_PYNCCL",
            "HUMMING_DISABLE_PARALLEL_BUILD",
        ),
        "1",
    )
    os.environ.update(on | off)
    sys.meta_path.insert(0, Finder())
    exists = pathlib.Path.exists  # the driver's device node, by which Hotbunk tells that there are GPUs
    pathlib.Path.exists = lambda self, **options: (
        str(self) == "/dev/nvidiactl" or exists(self, **options)
    )
