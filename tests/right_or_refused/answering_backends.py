"""Fake backends that answer wrongly on purpose, and callables that make no backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.backend import Backend, BackendFacts
from engine.backends.fake.backend import FakeBackend
from schemas.settings import EngineSettings

PACKS: list[int] = []  # prompts of each prefill of `SmallDevice` that fitted


class Answering(FakeBackend):
    """A fake whose log-probabilities go through `change`, and whose embeddings do."""

    def __init__(
        self,
        change: Callable[[torch.Tensor], Any] = lambda out: out,
        vectors: Callable[[torch.Tensor], Any] = lambda out: out,
    ) -> None:
        super().__init__()
        self._change, self._vectors = change, vectors

    def log_probs(self, context: Any, rows: Any, targets: Any, norm: Any) -> Any:
        return self._change(super().log_probs(context, rows, targets, norm))

    def embed(self, prompts: Any, pooling: Any) -> Any:
        return self._vectors(super().embed(prompts, pooling))


class Without(FakeBackend):
    """Gives some tokens the probability 0, whatever stands before them."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        super().__init__()
        self._tokens = torch.tensor(tokens)

    def log_probs(self, context: Any, rows: Any, targets: Any, norm: Any) -> Any:
        out = super().log_probs(context, rows, targets, norm)
        token = torch.from_numpy(targets.columns.token_ids)[targets.column]
        return torch.where(torch.isin(token, self._tokens), -torch.inf, out)


class FewPrompts(FakeBackend):
    """Forgets the last prompt of a pack."""

    def prefill(self, prompts: Any, max_nodes: int) -> Any:
        context = super().prefill(prompts, max_nodes)
        context._num_prompts -= 1
        return context


class FewNodes(FakeBackend):
    """Forgets the last node of a call."""

    def extend(self, context: Any, nodes: Any) -> None:
        super().extend(context, nodes)
        context.keys = context.keys[:-1]


class SmallDevice(FakeBackend):
    """A device of 260 rows. Notes the packs that it took."""

    def prefill(self, prompts: Any, max_nodes: int) -> Any:
        if len(prompts.token_ids) + max_nodes > 260:
            raise torch.OutOfMemoryError("out of memory, as torch says it")
        PACKS.append(prompts.num_prompts)
        return super().prefill(prompts, max_nodes)


class NoEmbed:
    """No backend: it has no `embed`."""

    @property
    def facts(self) -> BackendFacts:
        raise NotImplementedError

    def prefill(self, prompts: Any, max_nodes: int) -> Any: ...

    def extend(self, context: Any, nodes: Any) -> None: ...

    def log_probs(self, context: Any, rows: Any, targets: Any, norm: Any) -> Any: ...

    def close(self) -> None: ...


class OldExtend(FakeBackend):
    """Takes a token and its depth, as no contract here ever asked."""

    def extend(self, context: Any, token: Any, depth: Any) -> None: ...  # type: ignore[override]


class NoFacts(FakeBackend):
    facts = None  # type: ignore[assignment]


DEAD = {
    "minus_infinity": lambda out: torch.full_like(out, -torch.inf),
    "nan": lambda out: torch.full_like(out, torch.nan),
    "logits": lambda out: out.abs() + 1,
}
WRONG = {
    "one_more": lambda out: torch.cat([out, out[-1:]]),
    "one_less": lambda out: out[:-1],
    "two_dimensions": lambda out: out[:, None],
    "halves": lambda out: out.half(),
    "doubles": lambda out: out.double(),
    "integers": lambda out: out.long(),
    "a_list": lambda out: out.tolist(),
}
WRONG_VECTORS = WRONG | {
    "wider": lambda out: torch.cat([out, out], dim=1),
    "transposed": lambda out: out.T,
    "flat": lambda out: out.reshape(-1),
}


def of(kind: str, change: Any) -> Callable[[EngineSettings], Backend]:
    def create(settings: EngineSettings) -> Backend:
        return Answering(**{kind: change})

    return create


for _name, _change in (DEAD | WRONG).items():
    globals()[_name] = of("change", _change)
for _name, _change in WRONG_VECTORS.items():
    globals()[f"vectors_{_name}"] = of("vectors", _change)


def some_tokens_dead(settings: EngineSettings) -> Backend:
    """The byte-level ids of `<c_0>` to `<c_4>` of tests/factories.py, one code of six left."""
    return Without(tuple(range(256 + 5 + 4, 256 + 5 + 4 + 5)))


def no_y(settings: EngineSettings) -> Backend:
    """The letter y has no probability."""
    return Without((ord("y"),))


def few_prompts(settings: EngineSettings) -> Backend:
    return FewPrompts()


def few_nodes(settings: EngineSettings) -> Backend:
    return FewNodes()


def small_device(settings: EngineSettings) -> Backend:
    return SmallDevice()


def no_settings() -> Backend:
    return FakeBackend()


def two_settings(settings: EngineSettings, more: int) -> Backend:
    return FakeBackend()


def says_no_embed(settings: EngineSettings) -> NoEmbed:
    return NoEmbed()


def returns_nothing(settings: EngineSettings):
    return None


def returns_no_embed(settings: EngineSettings):
    return NoEmbed()


def returns_old_extend(settings: EngineSettings):
    return OldExtend()


def returns_no_facts(settings: EngineSettings):
    return NoFacts()


not_callable = 3
