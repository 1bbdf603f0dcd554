"""Requests without pause from 8 connections, by turns for trials' epochs, experiments and their trials."""

import asyncio
import random
import time

import httpx2 as httpx

CONNECTIONS = 8


async def _ask_all(url: str, trials: int, experiments: int, seconds: float) -> dict[str, float]:
    counts = {"done": 0, "errors": 0}
    end = time.perf_counter() + seconds

    async def ask(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            while time.perf_counter() < end:
                path = rng.choice(
                    (
                        f"/v1/trials/{rng.randint(1, trials)}/metrics?limit=20",
                        f"/v1/experiments/{rng.randint(1, experiments)}",
                        f"/v1/experiments/{rng.randint(1, experiments)}/trials?limit=10",
                        "/livez",
                    )
                )
                try:
                    answer = await client.get(path)
                    counts["errors"] += not answer.is_success
                except httpx.HTTPError:
                    counts["errors"] += 1
                counts["done"] += 1

    began = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(CONNECTIONS)))
    return {"per_second": counts["done"] / (time.perf_counter() - began), "errors": counts["errors"]}


def sustained(url: str, trials: int, experiments: int, seconds: float) -> dict[str, float]:
    """Requests a second and errors; `trials` and `experiments` are the numbers of those that there are."""
    return asyncio.run(_ask_all(url, trials, experiments, seconds))
