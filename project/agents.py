"""The example's agents; no model is called, so the demo works offline."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from django.conf import settings

from aguiapp import RunError, agent
from project import scripted
from project.models import Order

if TYPE_CHECKING:
    from aguiapp import RunContext

#: The agents with a chat page, and what to try there.
SHOWN = {
    "support": "Looks up an order: “Where is order 1001?”",
    "echo": "Says back what you say, word by word.",
    "counter": "Counts in the shared state, five steps per turn.",
    "tokens": "Streams numbered tokens, as a language model would.",
}


@agent("echo")
async def echo(run: RunContext) -> None:
    """Say back the last message, word by word."""
    async with run.message() as message:
        for word in re.findall(r"\S+\s*", run.last_user_text) or ["(nothing)"]:
            await message.write(word)


@agent("counter")
async def counter(run: RunContext) -> None:
    """Count up in the shared state, `n` steps."""
    steps = int(number(run.forwarded, "n", default=5, highest=1000))
    state = run.state if isinstance(run.state, dict) else {}
    count = state.get("count")
    if not isinstance(count, int):
        count = 0
        await run.set_state({**state, "count": count})
    for value in range(count + 1, count + steps + 1):
        await asyncio.sleep(0.1)
        await run.patch_state([{"op": "replace", "path": "/count", "value": value}])


@agent("support")
async def support(run: RunContext) -> None:
    """Find the order that the customer names, and say how it stands."""
    named = re.search(r"\d{1,9}", run.last_user_text)
    if named is None:
        async with run.message() as message:
            await message.write("Which order is it? Please give me its number, for example 1001.")
        return
    async with run.step("look up"):
        async with run.reasoning() as reasoning:
            for piece in ("The customer names ", f"order {named[0]}; ", "let me look it up."):
                await reasoning.write(piece)
        async with run.tool_call("find_order", {"number": int(named[0])}) as call:
            order = await run.call(find_order, int(named[0]))
            await call.result(order or {"error": "unknown order"})
    if order is not None:
        state = run.state if isinstance(run.state, dict) else {}
        await run.set_state({**state, "order": order})
    async with run.message() as message:
        for word in re.findall(r"\S+\s*", answer(int(named[0]), order)):
            await asyncio.sleep(0.03)
            await message.write(word)


def find_order(wanted: int) -> dict[str, Any] | None:
    """The order of that number, or None."""
    order = Order.objects.filter(number=wanted).first()
    return order.as_dict() if order else None


def answer(wanted: int, order: dict[str, Any] | None) -> str:
    """What support says about an order."""
    if order is None:
        return f"I am sorry, I cannot find an order {wanted}. Could you check the number?"
    return f"Order {wanted} ({', '.join(order['items'])}) is {order['status']}."


@agent("tokens")
async def tokens(run: RunContext) -> None:
    """Write `n` text deltas, `delay` seconds apart."""
    count = int(number(run.forwarded, "n", default=200, highest=100_000))
    delay = number(run.forwarded, "delay", default=0.05, highest=10)
    async with run.message() as message:
        for index in range(count):
            await message.write(f"{index} ")
            await asyncio.sleep(delay)


def number(forwarded: dict[str, Any], name: str, *, default: float, highest: float) -> float:
    """A number out of `forwardedProps`, within its bounds."""
    value = forwarded.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
        raise RunError(
            f"forwardedProps.{name} must be a number from 0 to {highest:g}.", code="bad_input"
        )
    return value


if settings.SCRIPTED_AGENT:
    agent("scripted")(scripted.play)
