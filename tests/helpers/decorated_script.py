"""What can be decorated, for type checkers. It is not run. tests/test_types.py puts each decorator in its place.

A comment `# error` marks a line that has to be an error.
"""

from collections.abc import AsyncIterator, Generator
from typing import Self, TypeVar, assert_type, overload

import torch
from torch import Tensor, nn

import torch_promote as tp

T = TypeVar("T", bound=nn.Module)

decorator = tp.my_autocast("cpu")


@decorator
def function(x: Tensor, /, scale: float = 1.0, *, name: str | None = None) -> Tensor:
    return x * scale


@decorator
def generic(model: T, *, copies: int) -> list[T]:
    return [model] * copies


@overload
def overloaded(x: Tensor) -> Tensor: ...
@overload
def overloaded(x: float) -> float: ...
def overloaded(x: Tensor | float) -> Tensor | float:
    return x


@decorator
async def coroutine(x: Tensor) -> float:
    return float(x)


@decorator
def generator(x: Tensor) -> Generator[Tensor, int, str]:
    sent = yield x
    return str(sent)


@decorator
async def asynchronous_generator(count: int) -> AsyncIterator[Tensor]:
    yield torch.ones(count)


class Model(nn.Module):
    @decorator
    def method(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    @decorator
    def build(cls, depth: int) -> Self:
        return cls()

    @staticmethod
    @decorator
    def loss(x: Tensor) -> float:
        return float(x)

    @property
    @decorator
    def width(self) -> int:
        return 3

    @decorator
    async def serve(self, x: Tensor) -> float:
        return float(x)

    @decorator
    def stream(self, x: Tensor) -> Generator[Tensor, None, None]:
        yield x

    def __call__(self, x: Tensor) -> Tensor:
        return x


model = Model()
assert_type(function(torch.ones(1), 2.0, name="a"), Tensor)
assert_type(generic(nn.Linear(1, 1), copies=2), list[nn.Linear])
assert_type(decorator(overloaded)(1.0), float)
assert_type(decorator(overloaded)(torch.ones(1)), Tensor)
assert_type(model.method(torch.ones(1)), Tensor)
assert_type(Model.build(3), Model)
assert_type(Model.loss(torch.ones(1)), float)
assert_type(model.width, int)
assert_type(list(model.stream(torch.ones(1))), list[Tensor])
assert_type(decorator(model)(torch.ones(1)), Tensor)
assert_type(decorator(lambda: 3)(), int)
function("x")  # error
function(torch.ones(1), scale="two")  # error
function(torch.ones(1), nam="a")  # error
function()  # error
function.backward()  # error
generic(3, copies=2)  # error
decorator(overloaded)("x")  # error
model.method(3)  # error
Model.build("3")  # error
Model.loss()  # error
model.width = "3"  # error
model.stream(3)  # error
decorator(model).parameters()  # error
decorator(3)  # error


async def main() -> str:
    assert_type(await coroutine(torch.ones(1)), float)
    assert_type(await model.serve(torch.ones(1)), float)
    async for x in asynchronous_generator(3):
        assert_type(x, Tensor)
    async for _ in asynchronous_generator("3"):  # error
        pass
    await coroutine(3)  # error
    return coroutine(torch.ones(1))  # error


def delegate() -> Generator[Tensor, int, None]:
    assert_type((yield from generator(torch.ones(1))), str)
    assert_type(generator(torch.ones(1)).send(3), Tensor)
    generator(torch.ones(1)).send("3")  # error
