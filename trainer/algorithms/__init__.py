"""The mathematics of reinforcement learning on tokens: pure functions of tensors, none of which needs a trainer.

Shapes: P prompts, G samples a prompt, B sequences, T positions with a target, K turns. Log-probabilities are in nats. A
mask is 1 on trainable tokens, those the policy sampled, and 0 elsewhere; tool output between two turns is masked, too.

They are put together like this, and every step is a choice:

    rewards    shaping, kl.penalty               [P, G] or [B, T]
    advantages advantages                        [B] or [B, T]
    ratio      losses.log_ratio                  [B, T], of tokens or of whole sequences
    loss       losses, kl                        [B, T]
    correction corrections                       [B, T], multiplies the loss or the mask
    number     (loss * aggregation.weights).sum()

Nothing here averages over a batch: what is divided by is a count over the whole step and all ranks, passed in.

Functions that take a mask select by it, so that masked positions may hold anything, inf and NaN included. Those without
one compute every position, and the last line multiplies: what they are given must be finite throughout
(`trainer.learning.policy_loss.only_trained`).
"""
