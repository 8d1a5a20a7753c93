"""`PlannedLoads`: the loads that each configuration is planned for, and the linear forms that are fitted to them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Collection, Sequence

import numpy as np

from peft_mux.scheduler.deployment.composed.row_mix import RowMix
from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.planned_times import PlannedLoad, PlannedTerms, PlannedTimeModel, fit_terms
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

_SHARES = (0.5, 2.0)
"""Loads of all lengths alike, in shares that GPUs would have if all were equally busy."""
_WITHIN = 1.5
"""How many times slower than the best a configuration may be by the curve, at each length, and still be planned."""
_MICRO_BATCHES = 16
"""Over which the curve compares them; as in the proposal of L Appendix A."""
_PRICED_WEIGHT = 4.0
"""How much a load that a replica was dispatched counts against one that was made up."""


class PlannedLoads:
    """What plans take on each configuration, for loads that are made up and for those that were dispatched.

    Args:
        planner: plans single replicas.
        mix: whose rows the sequences of a bucket are.
        bucketing: the expected batch (L section 4.2).
        curve: the time model of one curve, which knows the configurations; what is not planned is priced by it.
        num_gpus: GPUs of the whole deployment.
        always: configurations that are planned however far behind the curve has them.

    Attributes:
        planner: as given.
        bucketing: as given.
    """

    def __init__(
        self,
        planner: ReplicaPlanner,
        mix: RowMix,
        bucketing: Bucketing,
        curve: ReplicaTimeModel,
        num_gpus: int,
        always: Collection[ParallelConfig] = (),
    ) -> None:
        self.planner, self.mix, self.bucketing, self.curve, self.num_gpus = planner, mix, bucketing, curve, num_gpus
        self.configs = self._worth_planning(always)
        self._known: dict[ParallelConfig, dict[tuple[int, ...], PlannedLoad]] = {}

    @property
    def num_unplanned(self) -> int:
        """Configurations without any plan."""
        return sum(config not in self._known for config in self.configs)

    def plan_all(self, *, deadline: float) -> None:
        """Plan each configuration for a few loads, until the time is spent.

        Args:
            deadline: time of `time.perf_counter` at which no further configuration is begun; one is planned anyway.
        """
        for config in self.configs:
            if self._known and time.perf_counter() > deadline:
                return
            for counts in self._made_up(config):
                self.step_s(config, counts, weight=1.0)

    def step_s(self, config: ParallelConfig, counts: Sequence[int], *, weight: float = _PRICED_WEIGHT) -> float:
        """Return the seconds that the plan of a replica takes for so many sequences of each bucket; kept for fits.

        Args:
            config: how the replica is spread over GPUs.
            counts: sequences of each bucket of the expected batch.
            weight: how much it counts in fits.
        """
        key = tuple(counts)
        if not any(key):
            return 0.0
        known = self._known.setdefault(config, {})
        if key not in known or known[key].weight < weight:
            seconds = self.planner.step_s(config, self.mix.rows(self.bucketing.boundaries, key))
            known[key] = PlannedLoad(key, self.bucketing.boundaries, seconds, weight)
        return known[key].seconds

    def model(self) -> PlannedTimeModel:
        """Return the linear forms fitted to all plans so far; without configurations that no plan fits into."""
        fits = {
            config: fit_terms(known.values())
            for config, known in self._known.items()
            if any(np.isfinite(load.seconds) for load in known.values())
        }
        fits |= self._of_the_curve(fits)
        return PlannedTimeModel(fits, {config: self.curve.max_tokens[config] for config in fits})

    def _of_the_curve(self, fits: dict[ParallelConfig, PlannedTerms]) -> dict[ParallelConfig, PlannedTerms]:
        """Return forms of the configurations that were not planned: the curve, scaled as plans are on the others."""
        left = [config for config in self.configs if config not in self._known]
        if not left:
            return {}
        ratios = [
            load.seconds / self._curve_s(config, load.counts)
            for config in fits
            for load in self._known[config].values()
            if np.isfinite(load.seconds)
        ]
        scale = statistics.median(ratios)
        found = {}
        for config in left:
            loads = [
                PlannedLoad(counts, self.bucketing.boundaries, scale * self._curve_s(config, counts))
                for counts in self._made_up(config)
            ]
            found[config] = fit_terms(loads)
        return found

    def _curve_s(self, config: ParallelConfig, counts: Sequence[int]) -> float:
        limit = self.curve.max_tokens[config]
        # A curve takes no length above its limit, not even for no sequences; lengths ascend.
        lengths = [length for length in self.bucketing.boundaries if length <= limit]
        return self.curve.step_s(config, counts[: len(lengths)], lengths, limit)

    def worth_combining(self, model: PlannedTimeModel, within: float) -> tuple[ParallelConfig, ...]:
        """Return the configurations of highest throughput for some number of GPUs, length and load (L Appendix A).

        L proposes by the throughput of many full micro-batches. Where loads are light, what a step costs at all decides
        as well, so that throughputs are those of the shares that replicas would have.

        Args:
            model: predicts the seconds of one replica.
            within: how many times slower than the best a configuration may be; 1 for none but the best.
        """
        chosen: set[ParallelConfig] = set()
        lengths = [length for length, count in self._expected() if count]
        for length, share in itertools.product(lengths, _SHARES):
            rates = {
                config: self._rate(model, config, length, share)
                for config in model.configurations
                if model.max_tokens[config] >= length
            }
            for size in {config.num_gpus for config in rates}:
                # On a multiple of its GPUs a configuration is replicated, at the same rate a GPU.
                rivals = [config for config in rates if size % config.num_gpus == 0]
                least = max(rates[config] for config in rivals) / within
                chosen |= {config for config in rivals if rates[config] >= least}
        return tuple(config for config in model.configurations if config in chosen)

    def _rate(self, model: PlannedTimeModel, config: ParallelConfig, length: int, share: float) -> float:
        """Return tokens a GPU and second of one length, for a share of the batch."""
        number = max(1.0, share * config.num_gpus / self.num_gpus * self.bucketing.padded_tokens / length)
        terms = model.terms[config]
        return number * length / (terms.fixed_s + number * terms.sequence_s(length)) / config.num_gpus

    def _worth_planning(self, always: Collection[ParallelConfig]) -> tuple[ParallelConfig, ...]:
        """Return the configurations that the curve has not far behind at every length, by GPUs."""
        fitting = [config for config in self.curve.configurations if config.num_gpus <= self.num_gpus]
        found = set(always)
        for length, count in self._expected():
            rates = {config: self.curve.throughput(config, length, _MICRO_BATCHES) for config in fitting if count}
            found |= {config for config, rate in rates.items() if rate and rate * _WITHIN >= max(rates.values())}
        return tuple(config for config in fitting if config in found)

    def _expected(self) -> list[tuple[int, int]]:
        """Return the padded length of each bucket and its sequences."""
        return list(zip(self.bucketing.boundaries, self.bucketing.counts, strict=True))

    def _made_up(self, config: ParallelConfig) -> list[tuple[int, ...]]:
        """Return the loads that a configuration is planned for: sequences of each bucket.

        All lengths that it holds, as they come in the batch, in several amounts; the shorter and the longer half of its
        tokens alone; and one sequence of the longest, which shows what a step costs at all.
        """
        limit = self.curve.max_tokens[config]
        fitting = np.array([count if length <= limit else 0 for length, count in self._expected()], dtype=float)
        if not fitting.any():
            return []
        lengths = np.array(self.bucketing.boundaries, dtype=float)
        # As many tokens as fall to its GPUs where all are equally busy; the lengths that it holds make them up.
        wanted = config.num_gpus / self.num_gpus * float(self.bucketing.padded_tokens)
        middle = np.searchsorted(np.cumsum(fitting * lengths), (fitting * lengths).sum() / 2)
        places = np.arange(len(lengths))
        found = [_scaled(fitting, lengths, share * wanted) for share in _SHARES]
        found += [_scaled(fitting * half, lengths, wanted) for half in (places <= middle, places >= middle)]
        longest = int(np.flatnonzero(fitting)[-1])
        found.append(tuple(int(place == longest) for place in places))
        return list(dict.fromkeys(found))


def _scaled(counts: np.ndarray, lengths: np.ndarray, tokens: float) -> tuple[int, ...]:
    """Return sequences in these proportions with about so many tokens; of each bucket that has any at least one."""
    scaled = counts * tokens / float((counts * lengths).sum())
    return tuple(int(max(1, round(count))) if count else 0 for count in scaled.tolist())
