"""The mathematics of reinforcement learning on tokens, as pure functions of tensors that need no
trainer.

Shapes: P prompts, G samples a prompt, B sequences, T positions with a target, K turns.
Log-probabilities are in nats. A mask is 1 on trainable tokens, those the policy sampled, and 0
elsewhere, also on tool output between two turns.

A recipe combines the functions as follows, and chooses one for every row:

    rewards    shaping, kl.penalty               [P, G] or [B, T]
    advantages advantages                        [B] or [B, T]
    ratio      losses.log_ratio                  [B, T], per token or per sequence
    loss       losses, kl                        [B, T]
    correction corrections                       [B, T], multiplies the loss or the mask
    number     (loss * aggregation.weights).sum()

Nothing here averages over a batch: every divisor is a count over the whole step and all ranks,
which the caller passes.

Functions that take a mask select by it, so that masked positions may hold anything, inf and NaN
included. Functions without a mask compute every position, and the last row multiplies by weights:
their inputs must be finite everywhere (`trainer.learning.policy_loss.only_trained`).
"""
