"""Log-probabilities and entropy of targets from hidden states, in chunks, without a tensor of all logits.

Legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary. The forward pass keeps two numbers per token (the
logarithm of the normaliser, and the entropy); the backward pass computes each chunk's logits once more. Both need the
memory of a few [C, V] float32 tensors, however long the batch is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one chunk's float32 logits on a CPU: 4 MiB, so that the softmax runs in the cache. With fewer tokens than
# MIN_CHUNK, reading the weight costs more than multiplying by it: on a CPU with a vocabulary of 152k, chunks of 8 took
# five times as long as chunks of 256.
CPU_ELEMENTS = 1 << 20
MIN_CHUNK = 256

# Share of a GPU's memory for one chunk's float32 logits. Large chunks pay, since in backward each chunk reads and
# writes the head's entire gradient: of 80 GiB the share is 1 GiB (1,764 tokens with a vocabulary of 152k), beside which
# two more such tensors exist. It is a share of all memory, not of the free memory, which would change the order of
# summation in a resumed run.
DEVICE_SHARE = 1 / 80


def target_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H], same dtype as hidden
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [N] int64
    temperature: float = 1.0,  # > 0; the temperature the targets were sampled at
    chunk_tokens: int | None = None,  # C; by default chosen from V and the device
    fp32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy of that distribution.

    The matrix product is computed in the inputs' dtype, as in the engine, and everything after it in float32 (float64
    for float64 inputs). Both results are differentiable in hidden, weight and bias; gradients are in the inputs' dtype.
    With `fp32_head`, the product's result is float32 instead of being rounded to bfloat16; the engine must do the same
    (`EngineSettings.fp32_head`), or the gap between the two grows. Returns logprobs [N] and entropy [N] in nats,
    float32.
    """
    if chunk_tokens is None:
        elements = CPU_ELEMENTS
        if hidden.is_cuda:
            elements = cuda_chunk_elements(torch.cuda.get_device_properties(hidden.device).total_memory)
        chunk_tokens = max(MIN_CHUNK, elements // weight.shape[0])
    logprobs, entropy = _TargetLogprobs.apply(hidden, weight, bias, targets, temperature, chunk_tokens, fp32_head)
    return logprobs, entropy


def cuda_chunk_elements(device_bytes: int) -> int:
    """The number of logits computed at a time on a GPU with `device_bytes` of memory."""
    return int(device_bytes * DEVICE_SHARE / 4)


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, wide: bool) -> Tensor:
    """The logits of a chunk divided by the temperature, [C, V], float32 or wider, not yet normalised."""
    if wide and hidden.is_cuda:  # reads bfloat16, sums and writes float32, without a float32 copy of the weight
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits.add_(bias)
    else:
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _head_operands(weight: Tensor, bias: Tensor | None, wide: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias for `_scaled_logits`, widened if the device has no product with a wide result."""
    if not wide or weight.is_cuda:
        return weight, bias
    return weight.float(), None if bias is None else bias.float()


class _TargetLogprobs(torch.autograd.Function):
    """The function of `target_logprobs`, which saves hidden, weight, bias, targets and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        fp32_head: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(3))
        wide = fp32_head and hidden.dtype is not dtype
        operands = _head_operands(weight, bias, wide)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _scaled_logits(hidden[part], *operands, temperature, wide)
            normaliser[part] = torch.logsumexp(logits, dim=1)
            logprobs[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - normaliser[part]
            logits -= normaliser[part].unsqueeze(1)
            entropy[part] = -torch.linalg.vecdot(logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.wide = temperature, chunk, wide
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Uses, with p = softmax(z), d logprob_t / dz = onehot_t - p and d entropy / dz = -p (log p + entropy)."""
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=normaliser.dtype, device=bias.device)
        operands = _head_operands(weight, bias, ctx.wide)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _scaled_logits(hidden[part], *operands, ctx.temperature, ctx.wide)
            grad = _grad_logits(
                logits.sub_(normaliser[part].unsqueeze(1)),
                targets[part],
                entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            narrow = grad.to(hidden.dtype)
            torch.mm(narrow, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, narrow.t(), hidden[part])
            del logits, grad, narrow  # else they would exist beside the next chunk's
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Computes total += left @ right, [V, H]; the sum stays wide between chunks, since bfloat16 loses small terms."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # reads bfloat16 and adds in float32, without a separate tensor for the product
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _grad_logits(
    log_p: Tensor, targets: Tensor, entropy: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The gradient with respect to the logits after division by the temperature, [C, V]; overwrites `log_p`."""
    p = log_p.exp()
    if grad_entropy is None:
        grad = p
    else:
        grad = log_p.add_(entropy.unsqueeze(1)).mul_(p).mul_(-grad_entropy.unsqueeze(1))
    if grad_logprobs is not None:
        column = grad_logprobs.unsqueeze(1)
        grad = p.mul_(-column) if grad_entropy is None else grad.addcmul_(p, column, value=-1.0)
        grad.scatter_add_(1, targets.unsqueeze(1), column)
    elif grad_entropy is None:
        grad.zero_()
    return grad
