"""How many tokens a prompt has, by the length of its text: nobody tokenizes it for the sake of an estimate."""

from collections import OrderedDict
from dataclasses import dataclass

PRIOR = 0.25
"""Tokens per byte of a model of which nothing is known: English text."""

MAX_MODELS = 1000
"""Models and adapters remembered: clients name them. Beyond that the one noted longest ago is forgotten."""

_MIN_RATE, _MAX_RATE = 1 / 64, 4
"""Bounds of tokens per byte. A prompt beyond them is not (only) text, or its template outweighs it."""

_FULL_WEIGHT_BYTES = 4096
"""Prompts from this length on count alike; shorter ones less: their template distorts them."""

_PRIOR_WEIGHT = 256.0
"""What the prior counts, in bytes of text."""

_KEPT = 0.9
"""What is left of a prompt's weight after one more."""


@dataclass(slots=True)
class _Rate:
    weight: float = _PRIOR_WEIGHT
    weighted: float = _PRIOR_WEIGHT * PRIOR

    def note(self, rate: float, weight: float) -> None:
        self.weight = self.weight * _KEPT + weight
        self.weighted = self.weighted * _KEPT + weight * rate

    @property
    def value(self) -> float:
        return self.weighted / self.weight


class TokenRates:
    """Tokens per byte of text, for each model, learnt from what engines count."""

    def __init__(self) -> None:
        self._rates: OrderedDict[str, _Rate] = OrderedDict()

    def estimate(self, model: str, byte_count: int) -> int:
        """Returns the tokens of a prompt, at least one."""
        rate = self._rates.get(model)
        return max(round(byte_count * (rate.value if rate else PRIOR)), 1)

    def note(self, model: str, byte_count: int, token_count: int) -> None:
        """An engine has counted the tokens of a prompt. One without text or tokens tells nothing."""
        if byte_count <= 0 or token_count <= 0:
            return
        rate = max(min(token_count, byte_count * _MAX_RATE) / byte_count, _MIN_RATE)
        self._rates.setdefault(model, _Rate()).note(rate, min(byte_count, _FULL_WEIGHT_BYTES))
        self._rates.move_to_end(model)
        while len(self._rates) > MAX_MODELS:
            self._rates.popitem(last=False)
