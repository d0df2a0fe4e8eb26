"""A run from its first question to its last: who asks what is left, and what is told meanwhile.

Owns the order of work. One process may end at any point; what its ledger holds is never asked
again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.gpqa.asker import Asker, Patience
from deploy.gpqa.display import Display
from deploy.gpqa.endpoint import Endpoint
from deploy.gpqa.ledger import Contents, Ledger
from deploy.gpqa.presets import Prompt
from deploy.gpqa.records import End, Failure, Header, Record, Session
from deploy.gpqa.report import Report, make_report
from deploy.gpqa.series import MetricsPort, RunSeries
from deploy.gpqa.server_facts import ServerFacts, read_counters, read_facts
from deploy.version import git_revision
from placement.errors import ConfigError, NrankError

LOOK_S = 10.0  # between two looks at the server's counters


@dataclass(frozen=True)
class Plan:
    """What to do. `header` lacks what the server tells; `model` None takes the only one served."""

    folder: Path
    base_url: str
    model: str | None
    header: Header
    prompts: Sequence[Prompt]
    concurrency: int
    timeout_s: float
    patience: Patience
    metrics_port: int


def evaluate(plan: Plan) -> Report:
    """Asks all that has no answer yet. KeyboardInterrupt on SIGINT and SIGTERM.

    ServerFailure and LedgerFailure end a run that can be resumed; ConfigError one that can't begin.
    """
    try:
        return asyncio.run(_evaluate(plan))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _evaluate(plan: Plan) -> Report:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    series = RunSeries()
    async with Endpoint(plan.base_url, plan.concurrency, plan.timeout_s) as endpoint:
        facts = await read_facts(endpoint, plan.model)
        with (
            MetricsPort(series, plan.metrics_port) as metrics,
            closing(Ledger(plan.folder, _complete(plan, facts))) as ledger,
        ):
            print(f"metrics: {metrics.url}", file=sys.stderr)
            return await _Run(plan, endpoint, ledger, series).work(facts)


def _complete(plan: Plan, facts: ServerFacts) -> Header:
    """ConfigError when no prompt could fit beside the answer."""
    wanted = plan.header.max_tokens
    if 0 < facts.context_tokens <= wanted:
        raise ConfigError(
            f"--max-tokens {wanted} leaves no room for a prompt in the server's context of "
            f"{facts.context_tokens} tokens; use fewer"
        )
    return replace(
        plan.header,
        model=facts.model,
        plan_id=facts.plan_id,
        server_revision=facts.revision,
    )


class _Run:
    """One session of a run."""

    def __init__(self, plan: Plan, endpoint: Endpoint, ledger: Ledger, series: RunSeries) -> None:
        self._plan, self._endpoint, self._ledger = plan, endpoint, ledger
        self._header = ledger.contents.header
        # Questions that failed in earlier sessions are asked again, so they are not settled.
        self._records: list[Record] = [
            record for record in ledger.contents.records if not isinstance(record, Failure)
        ]
        done = ledger.contents.answered()
        self._left = deque(prompt for prompt in plan.prompts if prompt.question.id not in done)
        self._asker = Asker(endpoint, self._header, plan.patience)
        self._series = series
        self._display = Display(sys.stderr)
        self._began_s = time.monotonic()
        self._settled = 0  # in this session

    async def work(self, facts: ServerFacts) -> Report:
        self._write(
            Session(
                started_at=time.time(),
                base_url=self._endpoint.base_url,
                concurrency=self._plan.concurrency,
                client_revision=git_revision(),
                config_hash=facts.config_hash,
            )
        )
        how = "failed"
        try:
            await self._ask_all()
            how = "done"
        except asyncio.CancelledError:
            how = "interrupted"
            raise
        finally:
            self._display.close()
            self._write(End(time.time(), how))
        return self._report()

    async def _ask_all(self) -> None:
        """The first error that ends a run is raised; other questions are dropped then."""
        await self._look()
        self._tell()
        try:
            async with asyncio.TaskGroup() as group:
                looks = group.create_task(self._keep_looking())
                asks = [group.create_task(self._worker()) for _ in range(self._plan.concurrency)]
                await asyncio.wait(asks)
                looks.cancel()
        except* NrankError as errors:
            raise errors.exceptions[0] from None
        await self._look()

    async def _worker(self) -> None:
        while self._left:
            self._write(await self._asker.ask(self._left.popleft()))
            self._settled += 1
            self._tell()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        counters = await read_counters(self._endpoint)
        if counters is not None:
            self._write(counters)

    def _write(self, record: Record) -> None:
        self._ledger.append(record)
        self._records.append(record)

    def _report(self, now: float | None = None) -> Report:
        return make_report(Contents(self._header, tuple(self._records)), now)

    def _tell(self) -> None:
        report = self._report(time.time())
        elapsed_s = time.monotonic() - self._began_s
        left = report.header.questions - report.settled
        remaining_s = left * elapsed_s / self._settled if self._settled else None
        self._series.update(report, remaining_s)
        self._display.update(report, remaining_s)
