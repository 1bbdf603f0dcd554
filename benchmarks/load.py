"""Load for benchmarks/service.py: 8 connections that ask without pause; prints requests a second and errors as JSON.

python benchmarks/load.py URL TRIALS EXPERIMENTS SECONDS
"""

import asyncio
import json
import random
import sys
import time

import httpx2 as httpx

CONNECTIONS = 8


async def main(url: str, trials: int, experiments: int, seconds: float) -> None:
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
    print(json.dumps({"per_second": counts["done"] / (time.perf_counter() - began), "errors": counts["errors"]}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
