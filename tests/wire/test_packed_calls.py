"""Tests of packed calls, with a real actor."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dpex.wire.packed_calls import pack, packed

pytestmark = pytest.mark.usefixtures("shared_ray")


def test_a_packed_call_is_the_call() -> None:
    import ray

    class Adder:
        @packed
        async def add(self, left: int, right: int, *, twice: bool = False) -> dict[str, int] | None:
            if right == 0:
                raise ZeroDivisionError(left)
            return {"sum": (left + right) * (1 + twice)} if left else None

        @packed
        async def sum(self, left: int, stored: list[ray.ObjectRef]) -> int:
            return left + await stored[0]

    adder: Any = ray.remote(num_cpus=0)(Adder).remote()
    arguments = [pack(1, 2), pack(1, right=2, twice=True), pack(0, 2)]
    answers = ray.get([adder.add.remote(packed) for packed in arguments])
    assert [pickle.loads(answer) for answer in answers] == [{"sum": 3}, {"sum": 6}, None]
    assert all(isinstance(answer, bytes) for answer in answers)
    assert pickle.loads(ray.get(adder.sum.remote(pack(3), [ray.put(4)]))) == 7
    with pytest.raises(ZeroDivisionError, match="7"):
        ray.get(adder.add.remote(pack(7, 0)))
    with pytest.raises(TypeError, match="unknown"):
        ray.get(adder.add.remote(pack(unknown=1)))
