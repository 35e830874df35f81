"""Log-probabilities and entropy of targets from hidden states, in blocks, without a tensor of all
logits.

Legend: N tokens, H hidden size, V vocabulary; a block has R tokens and C columns of the vocabulary.
The forward pass goes through the blocks with a running maximum and running sums, and keeps two
numbers per token (the logarithm of the normaliser, and the entropy); the backward pass computes
each block's logits once more. Both need the memory of a few [R, C] float32 tensors, however long
the batch and however large the vocabulary is, and the head's gradient is written once, a block of
columns after the other (arXiv:2411.09009).

Logits are not kept between the passes: beside the head's gradient [V, H], which is not there yet in
the forward pass, there is room for those of H tokens. With H = 512 and N = 2,048 this would save a
quarter of one product of four, which is 3 to 4 % of a step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from trainer.policy.head import UNCHANGED, Logits
from trainer.policy.shortcuts import Shortcut, in_use

# Elements of one block's float32 logits on a CPU: 2 MiB (512 tokens, 1,024 columns), so that the
# softmax runs in the cache while the product is large enough for its full rate. Larger ones were no
# faster (scripts/bench/head.py).
CPU_ELEMENTS = 1 << 19

# Share of a GPU's memory for one block's float32 logits: of 80 GiB 128 MiB (4,096 tokens, 8,192
# columns). It is a share of all memory, not of the free memory, which would change the order of
# summation in a resumed run.
DEVICE_SHARE = 1 / 640


Maker = Callable[[Callable[..., Any]], Callable[..., Any]]


def _as_it_is(body: Callable[..., Any]) -> Callable[..., Any]:
    return body


def target_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H], same dtype as hidden
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [N] int64
    temperature: float = 1.0,  # > 0; the temperature the targets were sampled at
    block: tuple[int, int] | None = None,  # R and C; by default chosen from V and the device
    fp32_head: bool = False,
    head: Logits = UNCHANGED,
    make: Maker = _as_it_is,
) -> tuple[Tensor, Tensor]:
    """Return log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy
    of that distribution.

    The matrix product is computed in the inputs' dtype, as in the engine, and everything after it
    in float32 (float64 for float64 inputs). Both results are differentiable in hidden, weight and
    bias; gradients are in the inputs' dtype. With `fp32_head`, the product's result is float32
    instead of being rounded to bfloat16; the engine must do the same (`EngineSettings.fp32_head`),
    or the gap between the two grows. `make` may compile the pointwise bodies. Returns logprobs [N]
    and entropy [N] in nats, float32.
    """
    if block is None:
        elements = CPU_ELEMENTS
        if hidden.is_cuda:
            elements = cuda_block_elements(torch.cuda.get_device_properties(hidden.device).total_memory)
        block = block_shape(elements, weight.shape[0])
    wide = fp32_head and hidden.dtype is not torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden if head.before == 1.0 else hidden * head.before
    if not in_use(Shortcut.HEAD):
        rows = max(1, block[0] * block[1] // weight.shape[0])
        return _plain_logprobs(hidden, weight, bias, targets, temperature, rows, wide, head)
    settings = (temperature, block, wide, head, make)
    logprobs, entropy = _TargetLogprobs.apply(hidden, weight, bias, targets, settings)
    return logprobs, entropy


def _plain_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    rows: int,  # the tokens whose logits exist at a time; backward computes them again
    wide: bool,
    head: Logits,
) -> tuple[Tensor, Tensor]:
    """Compute what `target_logprobs` returns by torch's `log_softmax`, independently of the blocks.

    It is slower, and the weight's gradient is rounded to its dtype after each part of the rows.
    """
    if wide:
        weight = weight.float()
        bias = None if bias is None else bias.float()

    def of_rows(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias) * head.factor
        if head.cap is not None:
            logits = torch.tanh(logits / head.cap) * head.cap
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = torch.log_softmax(logits / temperature, dim=-1)
        return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)

    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    parts = [checkpoint(of_rows, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def cuda_block_elements(device_bytes: int) -> int:
    """Return the number of logits computed at a time on a GPU with `device_bytes` of memory."""
    return int(device_bytes * DEVICE_SHARE / 4)


def block_shape(elements: int, vocabulary: int) -> tuple[int, int]:
    """Return the tokens and the columns of a block: twice as many columns as tokens, a power of 2,
    if there are.
    """
    columns = min(vocabulary, 1 << ((2 * elements).bit_length() // 2))
    return max(1, elements // columns), columns


def _parts(size: int, part: int) -> Iterator[slice]:
    return (slice(start, min(start + part, size)) for start in range(0, size, part))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, head: Logits) -> Tensor:
    """Return a block of logits, [R, C], in the dtype of products, in which the engine changes them,
    too.
    """
    if wide and hidden.is_cuda:
        # Reads bfloat16, sums and writes float32, without a float32 copy of the weight
        products = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return head.of(products if bias is None else products.add_(bias))
    return head.of(torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias))


def _widened(logits: Tensor) -> Tensor:
    """Return logits in float32 or wider, to overwrite: a compiled body keeps its input, which would
    otherwise be written once more.
    """
    logits = logits.clone() if torch.compiler.is_compiling() else logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _head_operands(
    weight: Tensor, bias: Tensor | None, part: slice, wide: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a block of weight and bias, widened if the device has no product with a wide
    result.
    """
    weight = weight[part]
    bias = None if bias is None else bias[part]
    if not wide or weight.is_cuda:
        return weight, bias
    return weight.float(), None if bias is None else bias.float()


class _TargetLogprobs(torch.autograd.Function):
    """The function of `target_logprobs`, which saves hidden, weight, bias, targets and two numbers
    per token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: tuple[float, tuple[int, int], bool, Logits, Maker],
    ) -> tuple[Tensor, Tensor]:
        """Sum exp(z - m) and (z - m) exp(z - m) over the columns, where m is the maximum of a
        token's z so far.
        """
        temperature, (tokens, columns), wide, head, make = settings
        add = make(_add_block)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        chosen = torch.zeros(len(targets), dtype=dtype, device=hidden.device)
        total = torch.zeros_like(chosen)
        weighted = torch.zeros_like(chosen)
        # Finite, as infinity times 0 is no number
        maximum = torch.full_like(total, torch.finfo(dtype).min / 4)
        for part in _parts(weight.shape[0], columns):
            operands = _head_operands(weight, bias, part, wide)
            for rows in _parts(len(targets), tokens):
                logits = _logits(hidden[rows], *operands, wide, head)
                sums = [rows_of[rows].unsqueeze(1) for rows_of in (chosen, maximum, total, weighted)]
                add(logits, *_local_ids(targets[rows], part), *sums, temperature)
        logarithm = total.log()
        entropy = logarithm - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets, maximum + logarithm, entropy)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return chosen - maximum - logarithm, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Use, with p = softmax(z), d logprob_t / dz = onehot_t - p and d entropy / dz = -p (log p
        + entropy).
        """
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        temperature, (tokens, columns), wide, head, make = ctx.settings
        slopes_of = make(_grad_products)
        by_row = [normaliser, entropy, grad_logprobs, grad_entropy]
        dtype = normaliser.dtype
        narrows = hidden.device.type != "cpu"  # both products read the gradient in the narrow dtype
        grad_hidden = torch.zeros_like(hidden, dtype=dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
        for part in _parts(weight.shape[0], columns):
            operands = _head_operands(weight, bias, part, wide)
            total = None if grad_weight is None else torch.zeros_like(weight[part], dtype=dtype)
            for rows in _parts(len(targets), tokens):
                grad = slopes_of(
                    _logits(hidden[rows], *operands, wide, head),
                    *_local_ids(targets[rows], part),
                    *[None if of is None else of[rows].unsqueeze(1) for of in by_row],
                    temperature,
                    head,
                    hidden.dtype if narrows else dtype,
                )
                if grad_bias is not None:
                    grad_bias[part] += grad.sum(dim=0, dtype=dtype)
                narrow = grad.to(hidden.dtype)
                factors = (narrow, weight[part]) if narrows else (grad, weight[part].to(dtype))
                _add_product(grad_hidden[rows], *factors)
                if total is not None:
                    _add_product(total, narrow.t(), hidden[rows])
                del grad, narrow, factors  # else they would exist beside the next block's
            if grad_weight is not None and total is not None:
                grad_weight[part] = total
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


def _local_ids(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return the targets' columns within a part of the vocabulary, and which targets are in it,
    [R, 1].
    """
    local_ids = targets - part.start
    inside = (local_ids >= 0) & (targets < part.stop)
    return local_ids.where(inside, 0).unsqueeze(1), inside.unsqueeze(1)


def _add_block(
    logits: Tensor,
    local_ids: Tensor,
    inside: Tensor,
    chosen: Tensor,
    maximum: Tensor,
    total: Tensor,
    weighted: Tensor,
    temperature: float,
) -> None:
    """Add a block of logits to the sums of its rows, each [R, 1]; may overwrite `logits`."""
    logits = _widened(logits)
    logits = logits if temperature == 1.0 else logits.div_(temperature)
    chosen.add_(logits.gather(1, local_ids).where(inside, 0.0))
    largest = torch.maximum(maximum, logits.amax(dim=1, keepdim=True))
    change = maximum - largest
    exponentials = logits.sub_(largest).exp()
    weighted.addcmul_(change, total).mul_(change.exp())
    weighted.add_(torch.linalg.vecdot(exponentials, logits).unsqueeze(1))
    total.mul_(change.exp()).add_(exponentials.sum(dim=1, keepdim=True))
    maximum.copy_(largest)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left @ right; the sum stays wide between blocks, since bfloat16 loses small
    terms.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # reads bfloat16 and adds in float32, without a separate tensor for the product
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _grad_products(
    logits: Tensor,
    local_ids: Tensor,
    inside: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    head: Logits,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient with respect to the products that a block of logits was made of, [R, C];
    may overwrite the logits. The tensors after them are [R, 1].
    """
    logits = _widened(logits)
    slopes = head.slopes(logits)
    log_p = (logits if temperature == 1.0 else logits.div_(temperature)).sub_(normaliser)
    p = log_p.exp_() if grad_entropy is None else log_p.exp()
    if grad_entropy is None:
        grad = p
    else:
        grad = log_p.add_(entropy).mul_(p).mul_(-grad_entropy)
    if grad_logprobs is not None:
        grad = (
            p.mul_(-grad_logprobs)
            if grad_entropy is None
            else grad.addcmul_(p, grad_logprobs, value=-1.0)
        )
        if torch.compiler.is_compiling():  # in the same pass, which a scatter is not
            columns = torch.arange(grad.shape[1], device=grad.device)
            grad = grad + grad_logprobs.where(inside & (columns == local_ids), 0.0)
        else:
            grad.scatter_add_(1, local_ids, grad_logprobs.where(inside, 0.0))
    elif grad_entropy is None:
        grad.zero_()
    grad = grad if temperature == 1.0 else grad.div_(temperature)
    return (grad if slopes is None else grad.mul_(slopes)).to(dtype)
