"""What an audit finds: its gates, and how each went."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from schemas.records import Record, Stored

GateVerdict = Literal["passed", "warned", "refused", "no limit", "nothing to compare"]


class GateResult(Record):
    """One audit gate: what was measured, what is allowed, and whether it passed."""

    gate: str
    passed: bool
    value: float | None  # None: there was nothing to measure
    allowed: str
    detail: str = ""
    action: Literal["refuse", "warn"] = "refuse"  # what it does when it does not pass
    against: str | None = None  # the run that it compares with

    @property
    def verdict(self) -> GateVerdict:
        """What came of it. A gate that has no limit, or nothing to hold against it, did not pass
        anything.
        """
        if not self.passed:
            return "refused" if self.action == "refuse" else "warned"
        if self.allowed == "any":
            return "no limit"
        return "nothing to compare" if self.value is None else "passed"

    def words(self) -> str:
        """The gate in a sentence."""
        value = "not known" if self.value is None else f"{self.value:g}"
        return f"{self.gate} is {value}, allowed {self.allowed} ({self.detail})"


class AuditReport(Stored):
    """All gates of a run."""

    NAME: ClassVar[str] = "a run's audit"

    run_id: str
    attempts: dict[int, str] = Field(description="shard -> the attempt that was audited")
    gates: tuple[GateResult, ...]

    @property
    def refused(self) -> tuple[GateResult, ...]:
        """Gates that did not pass and keep the run from being published."""
        return tuple(g for g in self.gates if not g.passed and g.action == "refuse")

    @property
    def warned(self) -> tuple[GateResult, ...]:
        """Gates that did not pass and only say so."""
        return tuple(g for g in self.gates if not g.passed and g.action == "warn")


def count(name: str, bad: int, detail: str) -> GateResult:
    """A gate that allows nothing."""
    return GateResult(gate=name, passed=bad == 0, value=float(bad), allowed="0", detail=detail)


def threshold(
    name: str,
    value: float | None,
    detail: str,
    *,
    least: float | None = None,
    most: float | None = None,
) -> GateResult:
    """A gate with a limit; without one, or without a value, it only reports."""
    allowed, passed = "any", True
    if least is not None:
        allowed, passed = f">= {least:g}", value is None or value >= least
    if most is not None:
        allowed, passed = f"<= {most:g}", value is None or value <= most
    return GateResult(gate=name, passed=passed, value=value, allowed=allowed, detail=detail)
