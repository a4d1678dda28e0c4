"""Values of another module than the loss function's, which test_follow_kinds.py changes between steps."""

from __future__ import annotations

from typing import Any

SCALE = 1.0


def scaled(x: Any) -> Any:
    return x * SCALE


class Single:
    """Its value is read by a method."""

    def __init__(self) -> None:
        self.value, self.deep = 1.0, {"x": [1.0]}

    def get(self) -> float:
        return self.value * self.deep["x"][0]


single = Single()


class Slots:
    __slots__ = ("value",)


class Settings:
    value = 1.0

    @classmethod
    def get(cls) -> float:
        return cls.value
