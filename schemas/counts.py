"""What happened to rows: counts of a shard, which add up to those of a run."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.records import Record


class Counts(Record):
    """What happened to rows. Sums of shards are counts of the run; `imbalances` compares them."""

    users_in: int = 0
    users_recommended: int = 0
    users_embedded: int = 0
    users_quarantined: int = 0
    users_without_eligible: int = 0
    candidates_in: int = 0
    candidates_scored: int = 0
    candidates_unknown: int = 0
    candidates_excluded: int = 0
    candidates_ineligible: int = 0
    candidates_duplicate: int = 0
    candidates_unused: int = 0  # of users that were quarantined, or that are not in the users table
    rows_staged: int = 0
    rows_quarantined: int = 0
    users_exact: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts: the part that all share, forwarded once
    truncated_tokens: int = 0
    history_items: int = 0  # of the users that were not quarantined
    unknown_history_items: int = 0  # of those: not in the catalog, so no part of a prompt
    rows_forwarded: int = 0
    rows_naive: int = 0
    users_searched: int = 0  # best first, or by beams
    users_stopped: int = 0  # of those: the search ended as a beam
    search_nodes: int = 0  # prefixes that searches forwarded
    search_rounds: int = 0  # passes behind the prompts

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = self.model_dump(), other.model_dump()
        return Counts(**{name: mine[name] + theirs[name] for name in mine})

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """Sum of the parts."""
        total = cls()
        for part in parts:
            total = total + part
        return total

    def imbalances(self) -> list[str]:
        """Equations that do not hold, in words; empty when everything is accounted for."""
        users = (
            self.users_recommended
            + self.users_embedded
            + self.users_quarantined
            + self.users_without_eligible
        )
        candidates = (
            self.candidates_scored
            + self.candidates_unknown
            + self.candidates_excluded
            + self.candidates_ineligible
            + self.candidates_duplicate
            + self.candidates_unused
        )
        problems = []
        if users != self.users_in:
            problems.append(
                f"users in {self.users_in} != recommended {self.users_recommended} + embedded "
                f"{self.users_embedded} + quarantined {self.users_quarantined} + without eligible "
                f"{self.users_without_eligible}"
            )
        if candidates != self.candidates_in:
            problems.append(
                f"candidates in {self.candidates_in} != scored {self.candidates_scored} + unknown "
                f"{self.candidates_unknown} + excluded {self.candidates_excluded} + ineligible "
                f"{self.candidates_ineligible} + duplicate "
                f"{self.candidates_duplicate} + unused {self.candidates_unused}"
            )
        return problems
