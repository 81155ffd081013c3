"""One rank answers a question, all others read its answer: so ranks have equal costs and plans, made once.

Whoever asks first answers; who asks the same later waits for the answer. So ranks need not ask the same questions, nor
in the same order, and one that asks alone waits for nobody. Everything goes through the store of the process group:
a collective of ours could be paired with one of the model's on another rank.

    key/attempt             number of the last attempt that failed, so that the next one begins anew
    key/<n>/by              the rank that answers
    key/<n>/alive           counts up while it is at work
    key/<n>/answer          the answer
    key/<n>/failure         why there is none
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lowtide.distributed import policy
from lowtide.errors import RanksError
from lowtide.progress import Progress, silent
from lowtide.pytorch.process_groups import SharedStore, rank, shared_store


def agreed(question: str, work: str, make: Callable[[], str], progress: Progress = silent) -> str:
    """Return the answer to `question`, the same on every rank that asks; the first one to ask gets it by `make()`.

    Raises `RanksError` if the rank at work failed, or gives no sign of life any more.

    Args:
        question: All that the answer depends on.
        work: What the rank does that answers, such as "measures the ops", for messages.
        make: Makes the answer.
        progress: Is told whom this rank waits for.
    """
    store = shared_store()
    if store is None:
        return make()
    key = hashlib.sha256(question.encode()).hexdigest()[:32]
    attempt = int((store.get(f"{key}/attempt") or b"0").decode())
    subject = _Attempt(store, key, attempt, work)
    by = int(store.put_if(f"{subject.key}/by", "", str(rank())))
    if by != rank():
        progress(f"waiting for rank {by}, which {work}")
        return subject.wait_for(by)
    return subject.answer(make)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to answer one question."""

    store: SharedStore
    question: str
    number: int
    work: str

    @property
    def key(self) -> str:
        return f"{self.question}/{self.number}"

    def answer(self, make: Callable[[], str]) -> str:
        """Return what `make` returns, once the others can read it; let them know if it fails."""
        known = self.store.get(f"{self.key}/answer")
        if known is not None:
            # This rank has answered the same question earlier.
            return _unpacked(known)
        with self._alive():
            try:
                text = make()
            except BaseException as error:
                self.store.put(f"{self.key}/failure", f"{type(error).__name__}: {error}")
                self._give_up()
                raise
        self.store.put(f"{self.key}/answer", zlib.compress(text.encode()))
        return text

    def wait_for(self, by: int) -> str:
        """Return the answer of another rank."""
        sign: bytes | None = None
        since, pause = time.monotonic(), policy.POLICY.shortest_pause
        while True:
            found = self.store.get(f"{self.key}/answer")
            if found is not None:
                return _unpacked(found)
            failure = self.store.get(f"{self.key}/failure")
            if failure is not None:
                raise RanksError(
                    f"Rank {by}, which {self.work} for all ranks, has failed with {failure.decode()}\n"
                    "Its own output says where; what it needs to go on, the other ranks need as well."
                )
            last, sign = sign, self.store.get(f"{self.key}/alive")
            if sign != last:
                since = time.monotonic()
            elif time.monotonic() - since > policy.POLICY.silent_seconds:
                self._give_up()
                raise RanksError(
                    f"Rank {by}, which {self.work} for all ranks, has given no sign of life for "
                    f"{policy.POLICY.silent_seconds:g} seconds, so it is taken to be gone. Its own output says why; "
                    "start the training again."
                )
            time.sleep(pause)
            pause = min(2 * pause, policy.POLICY.longest_pause)

    def _give_up(self) -> None:
        """Let those who ask from now on begin anew."""
        self.store.put_if(f"{self.question}/attempt", str(self.number) if self.number else "", str(self.number + 1))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Give signs of life inside."""
        done = threading.Event()

        def beat() -> None:
            count = 0
            # Where the store is gone, the rank itself finds out when it gives its answer.
            with contextlib.suppress(RanksError):
                store = self.store.another()
                while not done.is_set():
                    store.put(f"{self.key}/alive", str(count))
                    count += 1
                    done.wait(policy.POLICY.beat_seconds)

        thread = threading.Thread(target=beat, name="lowtide-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # It is not waited for: where the store is gone, it takes minutes to notice that it cannot connect.
            done.set()


def _unpacked(packed: bytes) -> str:
    return zlib.decompress(packed).decode()
