# SPDX-License-Identifier: Apache-2.0
"""The gradients that backward stages store for earlier ones: who stores which, under what name, and who loads it.

Pure: nothing here computes anything.
"""

from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.values import Value
from ooc.model.stages.names import Names
from ooc.model.stages.schedule import Schedule


class GradientExchange:
    """Those of ``schedule``, whose matrices are called by ``names``."""

    def __init__(self, schedule: Schedule, names: Names) -> None:
        self._schedule = schedule
        self._names = names

    def incoming(self, stage: int) -> list[tuple[Value, str]]:
        """The gradients that later stages have stored for values of this one."""
        schedule, names = self._schedule, self._names
        found: list[tuple[Value, str]] = []
        for value in schedule.all_in_stage(stage):
            writers = self._writers(value)
            shared = schedule.shares_gradient(value) if value.trains else None
            if writers:
                found.append((value, names.gradient(value, writers, writers[-1])))
            elif shared is not None:
                found.append((value, names.sums_gradient(shared)))
        for aggregate in schedule.messages(stage):
            if isinstance(aggregate, Opaque) and aggregate.source.trains:
                found.append((aggregate.source, names.target_gradient(aggregate)))
                found.append((aggregate.source, names.message_gradient(aggregate)))
            elif isinstance(aggregate, EdgeAggregate) and aggregate.target is not None and aggregate.target.trains:
                found.append((aggregate.target, names.target_gradient(aggregate)))
        return found

    def passed_on(self, stage: int) -> dict[Value, tuple[str | None, str]]:
        """The values of earlier stages to whose gradients this one adds: what is there already, and the new name."""
        found: dict[Value, tuple[str | None, str]] = {}
        for earlier in range(stage):
            for value in self._schedule.all_in_stage(earlier):
                writers = self._writers(value)
                if stage in writers:
                    place = writers.index(stage)
                    prior = self._names.gradient(value, writers, writers[place - 1]) if place else None
                    found[value] = (prior, self._names.gradient(value, writers, stage))
        return found

    def traffic(self, stage: int) -> tuple[tuple[str, ...], dict[str, int]]:
        """Gradients that the backward of ``stage`` loads, and those it stores with their columns."""
        loads = [name for _, name in self.incoming(stage)]
        stores: dict[str, int] = {}
        pulled = self._schedule.pulled(stage)
        if isinstance(pulled, EdgeAggregate) and pulled.takes_gradient:
            stores[self._names.sums_gradient(pulled)] = pulled.upstream_columns
            if pulled.target is not None and pulled.target.trains and not pulled.pulls_targets:
                stores[self._names.target_gradient(pulled)] = pulled.target.columns
        elif pulled is not None and pulled.source.trains:
            stores[self._names.sums_gradient(pulled)] = pulled.columns
        for value, (prior, name) in self.passed_on(stage).items():
            stores[name] = value.columns
            if prior is not None:
                loads.append(prior)
        return tuple(dict.fromkeys(loads)), stores

    def _writers(self, value: Value) -> list[int]:
        """The stages whose backward adds to the gradient of ``value``, of an earlier stage; in their order."""
        schedule = self._schedule
        if not value.trains or schedule.shares_gradient(value) is not None:
            return []
        stages = {schedule.stage[user] for user in schedule.later_users(value)}
        stages |= {schedule.stage[user] - 1 for user in schedule.distant_users(value)}
        return sorted(stages, reverse=True)
