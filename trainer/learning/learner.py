"""The learning of one step, from top to bottom: groups, scores, credit, updates, metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sharding.ranks import sum_counts
from trainer.algorithms.losses import entropy_threshold, high_entropy_mask
from trainer.config.answer_age import longest_answer
from trainer.config.schema import TrainConfig
from trainer.learning.answer_rows import TokenMetrics, Watched
from trainer.learning.answers import Answer, exchange_samples
from trainer.learning.batching import Batcher
from trainer.learning.credit import assign_credit, has_signal
from trainer.learning.groups import Group, MiniBatch, informative, prepare, split, to_sample
from trainer.learning.metrics import (
    Metrics,
    critic_metrics,
    engine_gap,
    gap_without_update,
    over_ranks,
    share_metrics,
    stale_metrics,
    update_metrics,
)
from trainer.learning.policy_loss import CriticLoss, PolicyLoss
from trainer.learning.proof import first_few, try_shortcuts, undecided, with_decisions
from trainer.learning.routes import routing_metrics
from trainer.policy.critic import Critic
from trainer.policy.routing import balance, loads_of
from trainer.policy.shortcuts import Shortcut
from trainer.types import MicroBatch, Outputs, Policy, Scorer


@dataclass
class Learner:
    """Updates the policy on a step's trajectories. Every rank passes the same answers:

    learner = Learner(config, policy, reference, pad_id)
    metrics = learner.learn(answers, make_groups(answers), step)  # step 1, 2, …
    """

    config: TrainConfig
    policy: Policy
    reference: Scorer | None  # the model that KL is measured from, or the teacher
    pad_id: int
    # Weights of the reward functions, by label
    reward_weights: dict[str, float] = field(default_factory=dict)
    critic: Critic | None = None  # a critic with a trunk of its own
    # Collective: waiting or unfinished answers, some of which the policy's current version has
    # sampled
    untrained: Callable[[], list[Answer]] = list
    # Which of those tried stay (`RunState.shortcuts`)
    shortcuts: dict[str, bool] = field(default_factory=dict)
    # True: the recipe asks for common beginnings, which are not left out then
    sharing_required: bool = False
    batcher: Batcher = field(init=False)  # of `config`
    # The latest step's token metrics; on rank 0
    watched: list[Watched] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Compute as an earlier session of the run has decided."""
        if self.sharing_required:
            self.shortcuts.pop(Shortcut.PREFIXES, None)  # to be tried again
        self._follow_decisions()

    def learn(self, answers: list[Answer], groups: list[Group], step: int) -> Metrics:
        """Train on the batch of step number `step`, from 1; return the step's metrics, the same on
        all ranks.

        `groups` are the groups of the answers (`make_groups`).

        If all advantages of a step are 0, and its loss has no other term, its gradient is zero: the
        policy skips the step, since Adam's momentum would move the weights all the same. A critic
        learns from it. Groups whose tokens are all filtered are not part of any update; if all
        groups are, no model learns.

        There are as many updates as the recipe asks for, or one per group if fewer groups are left.
        The metric `updates` counts the policy's updates.
        """
        config = self.config
        # Groups that teach nothing go before the rest is split, so that updates are of about equal
        # size.
        if config.algorithm.drop_zero_variance:
            groups = [group for group in groups if informative(group)]
        filters = config.algorithm.overlong_filter
        masks = config.rollout.old_tokens == "mask"
        kept = []
        for group in groups:
            if any(t.trainable(filters, masks) for episode in group for t in episode):
                kept.append(group)
        groups = kept
        # Shortcuts are tried before anything is computed with them. What is decided may change the
        # recipe.
        trained = [t for group in groups for episode in group for t in episode]
        self._prove_shortcuts(trained)
        config = self.config
        # Each optimizer step gets its groups; each rank receives the answers of its share, in
        # micro-batches.
        version = self.policy.version if config.rollout.ages else None
        portions = split(groups, config.batch.updates_per_step)
        minibatches = prepare(portions, config, self.batcher, version)
        metrics: Metrics = {}
        if (least := config.batch.shared_min) is not None:
            metrics |= share_metrics(minibatches, least)
        # Scores of the weights that no update of this step has changed: losses compare with them,
        # and credit may be made of them.
        self._score_before(minibatches)
        assign_credit(minibatches, config, self.reward_weights)
        # Without an advantage or another pull, an update would only follow Adam's momentum.
        algorithm = config.algorithm
        pulled = (
            algorithm.kl_in_loss
            or algorithm.entropy_coef > 0
            or algorithm.balance_coef > 0
            or self._shared_critic
        )
        signal = bool(minibatches) and (has_signal(minibatches) or pulled)
        metrics |= {"no_signal_steps": float(not signal), "skipped_steps": 0.0, "updates": 0.0}
        self.watched = []
        # The first pass of each update measures the gap to the engine, on tokens of the policy's
        # current version. If there is no update, or no such token in it, some answers are scored
        # before the weights change.
        gap: Metrics = {}
        if not signal or all(t.sampled <= t.old for t in trained):
            waiting = [] if version is None else self.untrained()
            gap = gap_without_update([*answers, *waiting], self.policy, config, self.batcher, version)
        # Updates: the policy's, and the critic's, which learns returns also where no advantage is
        # left.
        if signal:
            metrics |= self._update_policy(minibatches, step)
        if self.critic is not None and minibatches:
            passes = self._passes(minibatches, step)
            updates = [
                self.critic.update(m.batches, CriticLoss(algorithm, m), progress)
                for m, progress in passes
            ]
            metrics |= critic_metrics(updates)
        metrics |= gap
        # The counts of routers are taken last, since every pass adds to them.
        if self.policy.routing is not None:
            metrics |= routing_metrics(self.policy.routing, int(metrics["updates"]))
        return metrics

    def _prove_shortcuts(self, answers: list[Answer]) -> None:
        """Try shortcuts that no earlier step has tried, on some of these answers, and go on as
        decided. Collective.
        """
        shortcuts = undecided(self.config, self.policy, self.shortcuts)
        if not shortcuts:
            return
        lengths = [answer.length for answer in answers]
        few = [first_few(share, lengths) for share in self.batcher.deal_answers(answers)]
        routes = self.batcher.routes
        [samples] = exchange_samples([answers], [few], partial(to_sample, routes=routes), routes)
        self.shortcuts |= try_shortcuts(
            shortcuts,
            samples,
            self.config,
            self.policy,
            self.batcher,
            sharing_required=self.sharing_required,
        )
        self._follow_decisions()

    def _follow_decisions(self) -> None:
        """Compute from now on as was decided on shortcuts so far."""
        self.config = with_decisions(self.config, self.shortcuts)
        self.batcher = Batcher.of(self.config, self.policy, self.pad_id)

    @property
    def _shared_critic(self) -> bool:
        """True if the critic shares the policy's trunk, so that the policy's outputs have
        values.
        """
        return self.config.algorithm.advantage_record.takes("values") and self.critic is None

    def _score_before(self, minibatches: list[MiniBatch]) -> None:
        """Compute log-probabilities and values from before the step's first update, if they are
        needed.
        """
        algorithm = self.config.algorithm
        temperature = self.config.sampling.temperature
        for_credit = (
            algorithm.advantage_record.takes("old_logprobs")
            or algorithm.kl_in_reward
            or self._shared_critic
        )
        # With a single update, its own forward pass gives the same log-probabilities: nothing has
        # changed yet.
        several = len(minibatches) * algorithm.num_iterations > 1
        for_balance = algorithm.balance_coef > 0 and self.config.model.routes == "recorded"
        if several or for_credit or for_balance or algorithm.high_entropy_share < 1:
            for minibatch in minibatches:
                batches = minibatch.batches
                outputs = self.policy.score(batches, temperature)
                for batch, old in zip(batches, outputs, strict=True):
                    batch.old_logprobs = old.logprobs
                    batch.old_values = old.values
                    batch.routes = batch.routes if old.routes is None else old.routes
                if algorithm.high_entropy_share < 1:
                    mark_high_entropy(batches, outputs, algorithm.high_entropy_share)
        batches = [batch for minibatch in minibatches for batch in minibatch.batches]
        if self.reference is not None:
            # Once a step, since its weights may have to come from host memory
            for batch, ref in zip(batches, self.reference.score(batches, temperature), strict=True):
                batch.ref_logprobs = ref.logprobs
        if self.critic is not None:
            for batch, values in zip(batches, self.critic.score(batches), strict=True):
                batch.old_values = values

    def _update_policy(self, minibatches: list[MiniBatch], step: int) -> Metrics:
        algorithm = self.config.algorithm
        longest = longest_answer(self.config)
        temperature = self.config.sampling.temperature
        updates = []
        gaps: list[tuple[Tensor, Tensor]] = []
        old: list[tuple[Tensor, Tensor, Tensor]] = []
        routing = self.policy.routing
        if routing is not None:
            routing.take_counts()  # drops the counts of passes before the first update
        token_metrics = TokenMetrics(self.config.tracking.tokens_per_step, minibatches)
        for minibatch, progress in self._passes(minibatches, step):
            loss = PolicyLoss(
                algorithm, minibatch, longest, token_metrics if minibatch is minibatches[0] else None
            )
            if algorithm.balance_coef and routing is not None:
                loads = sum_counts(loads_of(minibatch.batches, routing.format))
                routing.pull = balance(loads, routing.format, algorithm.balance_coef)
            updates.append(self.policy.update(minibatch.batches, loss, temperature, progress))
            if len(updates) <= len(minibatches):
                gaps += loss.gaps
                old += loss.old
        self.watched = token_metrics.take()
        if routing is not None:
            routing.pull = None
        stale = stale_metrics(old) if self.config.rollout.ages else {}
        return update_metrics(updates) | engine_gap(gaps, algorithm) | stale

    def _passes(self, minibatches: list[MiniBatch], step: int) -> list[tuple[MiniBatch, float]]:
        """Return the batch of each update of a step, with its progress in the run
        (`learning_rate_factor`).
        """
        order = minibatches * self.config.algorithm.num_iterations
        asked = updates_asked(self.config)
        return [
            (batch, (step - 1) * asked + done * asked / len(order)) for done, batch in enumerate(order)
        ]


def updates_asked(config: TrainConfig) -> int:
    """Return the number of updates in a step in which no group is left out."""
    return config.batch.updates_per_step * config.algorithm.num_iterations


def mark_high_entropy(batches: list[MicroBatch], outputs: list[Outputs], share: float) -> None:
    """Mark the tokens of highest entropy among all tokens of an optimizer step, over all ranks.
    Collective.
    """
    entropies = torch.cat([batch.trained(o.entropy) for batch, o in zip(batches, outputs, strict=True)])
    count, nth_smallest = over_ranks(entropies)
    threshold = entropy_threshold(count, nth_smallest, share)
    for batch, output in zip(batches, outputs, strict=True):
        batch.high_entropy = high_entropy_mask(output.entropy, batch.loss_mask, threshold)
