# SPDX-License-Identifier: Apache-2.0
"""Where what is read of a matrix waits until then, for people to read."""

from typing import NamedTuple, Self

from ooc.plan.workload import Fate


class Shares(NamedTuple):
    """Where what is read of a matrix waits until then, or that it is computed again, in per cent; together 100."""

    device: int
    host: int
    ssd: int
    recompute: int = 0

    def beside(self, again_bytes: int, *, of: int) -> Self:
        """The same where these are of ``of`` bytes, and ``again_bytes`` are computed again besides."""
        again = 100 * again_bytes // (of + again_bytes)
        waiting = [share * (100 - again) // 100 for share in (self.device, self.host, self.ssd)]
        waiting[waiting.index(max(waiting))] += 100 - again - sum(waiting)
        device, host, ssd = waiting
        return self._replace(device=device, host=host, ssd=ssd, recompute=again)

    @property
    def fate(self) -> str:
        """The tiers that hold some of it: ``host``, ``host + ssd``, …; and whether it is computed again."""
        tiers = (
            (Fate.DEVICE, self.device),
            (Fate.HOST, self.host),
            (Fate.SSD, self.ssd),
            (Fate.RECOMPUTE, self.recompute),
        )
        return " + ".join(fate.value for fate, share in tiers if share)


ALL_BELOW = Shares(0, 0, 100)
ALL_AGAIN = Shares(0, 0, 0, 100)
