"""ReplayBuffer: the ledger, the store of finished groups and the stream of prompts.

Owns: every prompt from its first lease until it is trained or dropped, and every group until its batch is trained, or where trainers can
restart until a checkpoint covers that.
Promises: an ordinal is trained once or dropped with a reason; no token is trained above `buffer.max_age`; `lease` and
`take` are answered as soon as there is something to give, and at the latest when the run is over, has failed or is closed.
Called by: rollout workers (`lease`, `put`, `fail`, `drop`), trainer ranks (`take`, `trained`), the controller (the rest).
May be blocked by: nothing. No endpoint awaits but the last one, `close`, and `save`, beside which others run; prompts are made in a thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.actor import Actor, concurrent_endpoint, endpoint

from monarch_rl.barren import Barren
from monarch_rl.config import Config, can_restart
from monarch_rl.curriculum import Curriculum
from monarch_rl.groups import by_reason, check_ages, figures, judge, make_shards, stamps
from monarch_rl.ledger import AgeError, Ledger
from monarch_rl.lives import Holdings, Life, Lost, Progress, State, TailError
from monarch_rl.observe import timeline
from monarch_rl.observe.ledger_file import LedgerFile
from monarch_rl.recorded import Written
from monarch_rl.supervise import Alarm
from monarch_rl.trainer_config import trains_dead_groups
from monarch_rl.types import Group, Lease, Prompt, Shard
from monarch_rl.uncovered import Uncovered

if TYPE_CHECKING:
    from monarch.actor import Port

RECENT = 16
"""Finished groups kept for display."""
FIGURES_KEPT = 256
"""Steps whose figures can still be asked for."""


class _Take(NamedTuple):
    port: Port[Shard | None]
    step: int
    rank: int


class ReplayBuffer(Actor):
    def __init__(self, config: Config, found: Path | None = None, keep_groups: bool = True) -> None:
        """`found`: the checkpoint to go on from; `keep_groups`: with what was finished there."""
        from monarch_rl.checkpoint import read_buffer
        from monarch_rl.prompts import PromptStream
        from monarch_rl.tasks import load_task

        buffer = config.buffer
        task = load_task(config.task, config.task_args, config.seed)
        state, groups = read_buffer(found) if found else ({}, [])
        self._lineage: int = state.get("lineage", 0)
        self._uncovered = Uncovered(config.checkpoint.uncovered_mb * 2**20 if can_restart(config) else None)
        after: int = state.get("step", 0)
        self._lives = LedgerFile(Path(config.output_dir) / "ledger.jsonl", after)
        self._config = config
        self._ledger = Ledger(
            prompts_per_step=buffer.prompts_per_step,
            max_age=buffer.max_age,
            window=buffer.window,
            max_attempts=config.rollout.max_attempts,
            steps=config.steps,
            ordinals=config.epochs * task.size if config.epochs and task.size is not None else None,
            tail=buffer.tail,
            on_change=self._lives.write,
        )
        if state:
            self._ledger.load_state_dict(state, keep_groups)
        fresh = count(self._ledger.started) if self._ledger.ordinals is None else range(self._ledger.started, self._ledger.ordinals)
        self._stream = PromptStream(task, buffer.prompts_per_step, chain(self._ledger.pending(), fresh))
        self._fetching: asyncio.Task[None] | None = None
        self._deadline = Alarm(self._expire)  # the next one of a lease
        self._ended: str | None = None  # why nothing more will be given
        self._idle: deque[tuple[Port[tuple[Lease, Prompt] | None], str]] = deque()  # workers that wait for a prompt
        self._gone: set[str] = set()  # workers that were lost
        self._takes: list[_Take] = []  # ranks that wait for a batch
        self._prompts: dict[int, Prompt] = {}  # made and without a group
        self._groups: dict[int, Group] = {group.ordinal: group for group in groups} if keep_groups else {}  # scored or taken
        self._batches: dict[int, list[int]] = {}  # taken, by step
        self._shards: dict[tuple[int, int], Shard] = {}  # (step, rank), until the rank has fetched it
        self._saved: tuple[dict[str, Any], list[Group]] | None = None  # for the checkpoint that is being written
        self._exhausted = False  # the data have ended, and no step is left in them
        self._barren = Barren(config, task.name)
        self._curriculum = Curriculum(task, state.get("outcomes"))
        self._recent: deque[Group] = deque(maxlen=RECENT)
        self._figures: dict[int, dict[str, float]] = {}
        self._files = Written(config, after, self._fail)

    @endpoint(explicit_response_port=True)
    async def lease(self, port: Port[tuple[Lease, Prompt] | None], worker: str) -> None:
        """A prompt for `worker`, as soon as one may be started; None when the run is over, has failed or is closed."""
        if worker not in self._gone:
            self._idle.append((port, worker))
            self._pump()

    @endpoint
    async def put(self, lease: Lease, group: Group) -> bool:
        """The group of a lease. False: the lease had been lost before, and the group is ignored.

        Raises:
            ValueError: the group answers another prompt.
        """
        if group.ordinal != lease.ordinal:
            raise ValueError(f"the lease is on prompt {lease.ordinal}, the group is of prompt {group.ordinal}")
        if self._void(lease):
            return False
        verdict = judge(group)
        trainable = verdict == "trainable" or (verdict == "dead" and self._config.buffer.dead_groups == "keep")
        if verdict == "unscorable":
            held = self._ledger.drop(lease.ordinal, verdict, lease.attempt)
        else:
            held = self._ledger.scored(lease.ordinal, lease.attempt, trainable, *stamps(group))
        if held:
            self._finished(group, trainable)
            self._pump()
        return held

    @endpoint
    async def fail(self, lease: Lease, reason: str) -> None:
        """No group came of a lease: its prompt is tried again, or dropped when its attempts are used up."""
        lost = None if self._void(lease) else self._ledger.failed(lease.ordinal, lease.attempt, "failed")
        self._lost([lost] if lost else [], reason)
        self._pump()

    @endpoint
    async def drop(self, lease: Lease, reason: str, lost: bool = False) -> None:
        """No attempt at this prompt can succeed: it is empty, or longer than the context, or those that worked on it were `lost`."""
        if not self._void(lease) and self._ledger.drop(lease.ordinal, "lost" if lost else "refused", lease.attempt):
            self._barren.refused(lease.ordinal, reason)
            self._dropped(lease.ordinal)
            self._pump()

    @endpoint
    async def release(self, worker: str) -> None:
        """A worker is gone: its prompts go back, and it gets no more, also where it was only stopped and wakes up."""
        self._gone.add(worker)
        self._idle = deque((port, name) for port, name in self._idle if name != worker)
        self._lost(self._ledger.release(worker), f"{worker} is gone", told=True)
        self._pump()

    @endpoint(explicit_response_port=True)
    async def take(self, port: Port[Shard | None], step: int, rank: int, lineage: int = 0) -> None:
        """The shard of `rank` of optimizer step `step`, as soon as the batch is complete; says that step - 1 is trained.

        None: the data have ended before this step. No answer: the trainers have restarted since, as another `lineage`.

        Raises (at the caller):
            ValueError: not the next step, or fetched before; or groups are left over at the end of the data (`buffer.tail=error`).
            AgeError: a token is too old; the message names its prompt.
            RuntimeError: there will be no such batch, and why.
        """
        if lineage == self._lineage:
            self._takes.append(_Take(port, step, rank))
            self._pump()

    @endpoint
    async def trained(self, step: int, lineage: int = 0) -> None:
        """Optimizer step `step` is done. Said early (before the next `take`), it opens leases early."""
        if lineage == self._lineage:
            self._trained(step)
            self._pump()

    @endpoint
    async def stats(self, step: int) -> dict[str, float]:
        """Figures of a batch that was taken: those of `groups.figures`, and of the moment at which it was taken.

        Raises:
            ValueError: the step was not taken, or too long ago.
        """
        if step not in self._figures:
            raise ValueError(f"there are no figures of step {step}; the last step taken is {self._ledger.taken_steps}")
        return self._figures[step]

    @endpoint
    async def samples(self, k: int) -> list[Group]:
        """The last finished groups, at most `k`, the newest last; dead ones among them."""
        return list(self._recent)[-k:] if k > 0 else []

    @endpoint
    async def snapshot(self, step: int) -> Progress:
        """Remember how all stands after step `step`, which is done, for a checkpoint that `save` writes."""
        self._trained(step)
        waiting = [self._groups[ordinal] for ordinal in sorted(self._groups)]
        more = {"outcomes": self._curriculum.state_dict(), "lineage": self._lineage}
        self._saved = self._ledger.state_dict() | more, waiting
        self._lives.mark(step)
        return self._ledger.progress()._replace(lineage=self._lineage)

    @concurrent_endpoint
    async def save(self, folder: Path) -> None:
        """Write the last snapshot into a checkpoint, beside everything else."""
        from monarch_rl.checkpoint import write_buffer

        saved, self._saved = self._saved, None
        assert saved is not None
        await asyncio.to_thread(write_buffer, folder, *saved)

    @endpoint
    async def covered(self, step: int) -> None:
        """A checkpoint of step `step` is complete: trainers will not restart from an earlier one."""
        self._uncovered.covered(step)

    @endpoint
    async def go_back(self, step: int, lineage: int) -> None:
        """The trainers restart from the checkpoint of step `step`, as `lineage`: the batches since are trained again.

        With `max_age=0` they are sampled again, as are groups for which there was no room. What is in flight will be ignored.
        """
        await self._files.go_back(step)
        keep_groups = self._ledger.max_age > 0
        again = self._uncovered.go_back(self._ledger.state_dict(), step, self._groups.values(), keep_groups)
        self._lives.back(step)
        self._ledger.load_state_dict(again.ledger, keep_groups)
        self._groups, self._prompts = again.groups, self._prompts | again.prompts
        self._lineage, self._exhausted = lineage, False
        self._takes, self._batches, self._shards = [], {}, {}
        self._figures = {done: figures for done, figures in self._figures.items() if done <= step}
        self._pump()

    @endpoint
    async def lives(self, states: Sequence[State], last: int) -> list[Life]:
        """The newest `last` prompts in any of these states, in order."""
        return self._ledger.newest(states, last)

    @endpoint
    async def holdings(self) -> Holdings:
        """What is in here now, for display."""
        return self._ledger.holdings()

    @endpoint
    async def set_max_age(self, max_age: int) -> None:
        """For prompts that are started from now on."""
        self._ledger.set_max_age(max_age)
        self._pump()

    @endpoint
    async def close(self) -> None:
        """Nothing more is given: waiting workers get None, waiting ranks an error. What is to be recorded is when this returns."""
        self._ended = self._ended or "the replay buffer is closed"
        self._pump()
        await self._files.close()

    def _void(self, lease: Lease) -> bool:
        """Whether the trainers have restarted since it was given."""
        void = lease.lineage < self._lineage
        self._ledger.stale += void
        return void

    def _pump(self) -> None:
        """Give what can be given. Called after every event; batches come first, since taking one can open leases."""
        self._serve_takes()
        self._serve_leases()
        counts = self._ledger.counts
        timeline.count("prompts", leased=counts.leased, ready=counts.scored)
        self._lives.flush()
        self._deadline.set(None if self._ended else self._ledger.next_deadline())

    def _serve_takes(self) -> None:
        waiting, self._takes = self._takes, []
        for take in waiting:
            try:
                shard = self._shard(take.step, take.rank)
            except (AgeError, ValueError, RuntimeError) as error:
                take.port.exception(error)
            else:
                if shard is None and not self._exhausted:
                    self._takes.append(take)
                else:
                    take.port.send(shard)

    def _serve_leases(self) -> None:
        # Where the trainers may yet go back, nothing is over before the end.
        if self._ended or (self._ledger.over and not self._uncovered.needed):
            while self._idle:
                self._idle.popleft()[0].send(None)
        # What a generator can hold at best: opening a lease earlier would only use up its deadline at the generator's gate.
        step = self._ledger.trained_steps - self._ledger.trained_steps % self._config.weights.every
        while self._idle and (ordinal := self._ledger.next_ordinal(step)) is not None:
            if ordinal not in self._prompts:
                if self._fetching is None:
                    self._fetching = asyncio.get_running_loop().create_task(self._next_prompt())
                return
            port, worker = self._idle.popleft()
            now = asyncio.get_running_loop().time()
            lease = self._ledger.lease(worker, now, self._config.rollout.deadline_s, step)
            assert lease is not None  # the ledger has just named its ordinal
            port.send((replace(lease, lineage=self._lineage), self._prompts[ordinal]))

    def _shard(self, step: int, rank: int) -> Shard | None:
        """None: not complete yet, or `_exhausted`. A batch that one rank has got is given to the others whatever happens."""
        if (step, rank) not in self._shards:
            if self._ended:
                raise RuntimeError(f"there is no batch for step {step}: {self._ended}")
            self._trained(step - 1)
            self._take(step)
        return self._shards.pop((step, rank), None)

    def _take(self, step: int) -> None:
        try:
            ordinals = self._ledger.take(step)
            if ordinals is None:
                return
            groups = [self._groups[ordinal] for ordinal in ordinals]
            check_ages(groups, step, self._ledger.age_bound, self._lineage)
        except (AgeError, TailError) as error:
            self._ended = str(error)
            raise
        if not ordinals:
            return self._exhaust()
        self._batches[step] = ordinals
        trainer = self._config.trainer
        dead_too = trains_dead_groups(trainer)
        shards = make_shards(groups, step, trainer.ranks, trainer.tokens_per_microbatch, dead_too=dead_too, lineage=self._lineage)
        self._shards |= {(step, rank): shard for rank, shard in enumerate(shards)}
        self._note(step, groups)

    def _trained(self, step: int) -> None:
        for done in [taken for taken in self._batches if taken <= step]:
            ordinals = self._batches.pop(done)
            groups = [self._groups.pop(ordinal) for ordinal in ordinals]
            self._uncovered.add(done, groups, map(self._ledger.age_bound, ordinals))
        self._ledger.trained(step)

    def _exhaust(self) -> None:
        """Each prompt of the data was trained or dropped."""
        if self._ledger.trained_steps == 0:
            dropped = by_reason(self._ledger.dropped)
            self._ended = f"all {self._ledger.started} prompts of the data were dropped ({dropped}). {self._barren.notes}"
            raise RuntimeError(f"there is no batch for step 1: {self._ended}")
        self._groups.clear()  # of a tail that is not trained
        self._exhausted = True

    def _note(self, step: int, groups: list[Group]) -> None:
        counts = self._ledger.counts
        buffer = {"buffer/fill": self._ledger.fill, "buffer/dropped": float(counts.dropped), "buffer/leased": float(counts.leased)}
        reasons = {f"buffer/dropped_{reason}": float(n) for reason, n in self._ledger.dropped.items()}
        self._files.write(step, groups, self._lineage)
        of_groups = figures(step, groups, self._barren.groups, self._lineage)
        self._figures[step] = of_groups | buffer | reasons | self._uncovered.figures()
        self._figures.pop(step - FIGURES_KEPT, None)
        self._barren.groups = []

    def _fail(self, why: str) -> None:
        self._ended = self._ended or why
        self._pump()

    def _finished(self, group: Group, trainable: bool) -> None:
        self._recent.append(group)
        self._curriculum.note(group, self._ledger.trained_steps)
        if trainable:
            self._prompts.pop(group.ordinal)
            self._groups[group.ordinal] = group
            self._barren.interrupted()
        else:
            self._barren.group(group)
            self._dropped(group.ordinal)

    def _lost(self, losses: Iterable[Lost], why: str, told: bool = False) -> None:
        """`told`: whoever reads the log knows already, and hears only of prompts that are dropped for it."""
        for lost in losses:
            self._barren.lost(lost, why, told)
            if lost.dropped:
                self._dropped(lost.ordinal)

    def _dropped(self, ordinal: int) -> None:
        self._prompts.pop(ordinal)
        self._ended = self._ended or self._barren.verdict(self._ledger.dropped)

    async def _next_prompt(self) -> None:
        try:
            prompt, skipped = await asyncio.to_thread(self._make)
        except Exception as error:  # whatever a task does ends the run with its words, at the ranks that wait for a batch
            self._ended = self._ended or str(error)
        else:
            if skipped:
                self._ledger.skip(prompt.ordinal)
            else:
                self._prompts[prompt.ordinal] = prompt
        self._fetching = None
        self._pump()

    def _make(self) -> tuple[Prompt, bool]:
        """The next prompt, and whether it is left out; one that was started before is not."""
        prompt = next(self._stream)
        return prompt, prompt.ordinal >= self._ledger.started and self._curriculum.skips(prompt, self._ledger.trained_steps)

    def _expire(self) -> None:
        lost = self._ledger.expire(asyncio.get_running_loop().time())
        self._lost(lost, f"rollout.deadline_s={self._config.rollout.deadline_s:g} passed")
        self._pump()
