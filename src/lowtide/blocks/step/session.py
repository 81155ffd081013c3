"""A training call that consists of several blocks: which variant each of them runs, so that the whole step fits.

Every block has a menu of plans. A call is a sequence of block runs. While a sequence is not known, blocks run the plan
that keeps least; once it is known, variants are chosen for all of it together. The sequence may change from call to
call: the choice is then made again for what has run and the longest rest that is known, and if nothing fits, the call
ends with an error before the block runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from lowtide import device as devices
from lowtide.blocks.policy import SESSION
from lowtide.blocks.step.block_figures import BlockFigures
from lowtide.blocks.step.call import Call, Shown
from lowtide.blocks.step.expected_gaps import expected_backward, expected_gaps
from lowtide.blocks.step.gap_book import Basis, GapBook, Runs
from lowtide.blocks.step.known_calls import KnownCalls
from lowtide.blocks.step.module_places import ModulePlaces, Spot
from lowtide.blocks.step.tracing_garbage import TracingGarbage
from lowtide.capture.arrived_gradients import Arrived
from lowtide.errors import InfeasibleBudgetError
from lowtide.lower.variants import Turn
from lowtide.plan.core.result import Plan
from lowtide.plan.diagnose.infeasible import AskedBudget
from lowtide.plan.menu import Entry
from lowtide.pytorch.autograd_graph import after_backward, before_backward
from lowtide.step.choose import Choices, NothingFits, StepChoice, least_peak
from lowtide.step.peak import infeasible_step
from lowtide.step.plan import StepPlan
from lowtide.step.plan_variant import plain_step
from lowtide.step.policy import POLICY as CHOICE
from lowtide.step.problem import StepProblem, holding, with_scalars
from lowtide.step.simulate import simulate_step
from lowtide.step.step_block import PriceFor, StepBlock
from lowtide.step.surroundings import AroundBlocks, Gaps
from lowtide.units import MOST_BUDGET_BYTES, Budget


class StepSession:
    """Chooses variants for the block runs of one model's calls, and learns what its calls consist of."""

    def __init__(self, budget: Budget, modules: ModulePlaces | None = None) -> None:
        self.blocks: list[StepBlock] = []
        self.whole_bytes = 0
        # Kept free as long as a sequence was not recorded.
        self._unseen_bytes = 0
        # The first call that has ended: percentages are of it.
        self._first: Call | None = None
        self.modules = modules or ModulePlaces(())
        self.device = torch.device("cpu")
        # The last refusal, if it was made before all of the call was known.
        self.uncertain: InfeasibleBudgetError | None = None
        self._budget = budget
        self._free_bytes: int | None = None
        self._exploring = False
        # Every thread may be in a call of its own.
        self._calls_of_threads = threading.local()
        self._waiting: list[Call] = []
        self._when_discarded: list[Callable[[Collection[int]], None]] = []
        self._numbers = count()
        self._turns: dict[int, tuple[Call, int]] = {}
        self._book = GapBook()
        self._recordings = 0
        self._figures = BlockFigures(self.blocks)
        self._choices = Choices(seconds=SESSION.choose_seconds, remembered=SESSION.remembered_choices)
        self._calls = KnownCalls()
        self._ran: tuple[int, ...] = ()
        self.around = AroundBlocks()
        self._garbage = TracingGarbage()

    def add(
        self,
        menu: Sequence[Entry],
        device: torch.device | None = None,
        price_for: PriceFor | None = None,
        *,
        name: str | None = None,
        gradient_bytes: int = 0,
    ) -> int:
        """Add a block with its menu, and return its number.

        Args:
            menu: Its plans. Without a name, a block with the same graph and costs is the same block.
            device: Where it runs.
            price_for: See `StepBlock`.
            name: The module that it is; by default it is named after its parameters when it runs.
            gradient_bytes: The gradients of parameters that its backward makes.
        """
        self.device = device or self.device
        problem = menu[0].plan.problem
        for number, block in enumerate(self.blocks if name is None else ()):
            known = block.menu[0].plan.problem
            if known.graph == problem.graph and known.costs == problem.costs and len(block.menu) == len(menu):
                return number
        self.blocks.append(StepBlock(name or f"graph {len(self.blocks)}", tuple(menu), price_for, gradient_bytes))
        return len(self.blocks) - 1

    def update(self, block: int, menu: Sequence[Entry]) -> None:
        """Replace the menu of a block whose runs take other bytes than it says; its variants stay in their order."""
        self.blocks[block] = replace(self.blocks[block], menu=tuple(menu))
        self._figures.renew(block)

    @property
    def _call(self) -> Call | None:
        """The call that this thread is in."""
        return getattr(self._calls_of_threads, "call", None)

    @_call.setter
    def _call(self, call: Call | None) -> None:
        self._calls_of_threads.call = call

    @property
    def _copied_bytes(self) -> int:
        """Copies that are there in the forward of the last call of this thread, which may be one that explores."""
        return getattr(self._calls_of_threads, "copied_bytes", 0)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Leave out of the recording of a call what compiling a block allocates."""
        self._garbage.note()
        if self._call is None:
            yield
            return
        with self._call.forward.paused():
            yield
        call = self._call
        if self.blocks and not call.forward.is_running and not call.blocks and self._wants_recording():
            # The first block of the first call: what came before it is known by the tensors that go in.
            self._garbage.free_before_recording()
            call.forward.start()

    @property
    def budget_bytes(self) -> int | None:
        """The budget, or None as long as it is a share of a step that is not known."""
        if self._budget.is_auto:
            self._free_bytes = self._free_bytes or devices.free_bytes(self.device)
            return self._free_bytes
        if self._budget.fraction is None:
            return self._budget.resolve(0)
        return max(self._budget.resolve(self.whole_bytes), 1) if self.whole_bytes else None

    def begin_call(self, outside: Callable[[], Iterable[torch.Tensor]], copied_bytes: int = 0) -> None:
        """Note that a call begins.

        Args:
            outside: Returns the tensors of the model and of the call's arguments.
            copied_bytes: Copies of some of them that are there until forward ends.
        """
        self._discard_call()
        self._call, self._calls_of_threads.copied_bytes = Call(outside), copied_bytes
        self._call.state = self.around.begin_call()
        if self.blocks and self._wants_recording():
            self._call.is_whole = True
            self._garbage.free_before_recording()
            self._call.forward.start()

    def end_call(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        """Note that the forward of a call has ended with these outputs: its sequence is known."""
        call, self._call = self._call, None
        if call is None or not call.blocks:
            if call is not None:
                call.discard()
            return
        self._garbage.free()
        self._garbage.end_call()
        call.end_forward(outputs)
        self._waiting.append(call)
        if len(self._waiting) > SESSION.remembered_calls:
            self._forget(self._waiting[0])
        sequence = tuple(call.blocks)
        self._note_forward(call, sequence)
        self._calls.note(sequence, call.spots)
        self.around.note(sequence, call.runs, call.leaf_bytes[-1])
        self._ran = tuple(call.variants)
        if self._exploring:
            self._forget(call)
        else:
            self._watch_backward(call, outputs)
        if self._first is None:
            # Until its backward is through, more is learned about it.
            self._note_unplanned(sequence)
            if not self._exploring:
                # Code behind the last block was not known before, nor what a percentage is of.
                self._check(call)
            self._first = None if self._exploring else call

    def _note_unplanned(self, sequence: Runs) -> None:
        """Note what percentages are of, with what is kept free as long as the sequence was not recorded."""
        if not self._unseen_bytes:
            share = int(CHOICE.unseen_share * self._unplanned_bytes(sequence))
            self._unseen_bytes = min(CHOICE.unseen_bytes, share)
        self.whole_bytes = max(self.whole_bytes, self._unplanned_bytes(sequence))

    def _unplanned_bytes(self, sequence: Runs) -> int:
        """Return the peak of a step that recomputes nothing: no less than its blocks take that keep everything."""
        problem, first = self._problem(sequence, MOST_BUDGET_BYTES), (0,) * len(sequence)
        plain = simulate_step(plain_step(problem, self._menus), first)
        return max(plain.peak_bytes, simulate_step(problem, first).peak_bytes)

    def abandon_call(self) -> None:
        """Note that a call has ended with an error."""
        if self._call is not None:
            self._calls.explored = None
        self._discard_call()

    def _discard_call(self) -> None:
        """Forget a call that has not ended: its graph would live on, and with it all that was saved."""
        self._garbage.end_call()
        call, self._call = self._call, None
        if call is not None:
            call.discard()
            turns = {number for number, (each, _) in self._turns.items() if each is call}
            self._forget(call)
            for note in self._when_discarded:
                note(turns)

    def when_discarded(self, note: Callable[[Collection[int]], None]) -> None:
        """Call `note` when a call has ended with an error, with its turns, to let go of what was made for it."""
        self._when_discarded.append(note)

    def forget_blocks(self) -> bool:
        """Forget all blocks, which were captured in a call that ended with an error; False if others know them."""
        if self.has_run or any(block.price_for is None for block in self.blocks):
            return False
        self._figures.clear()
        self.blocks.clear()
        self._turns.clear()
        return True

    def begin_again(self) -> None:
        """Forget all calls and their blocks, because none has trained and the model is now cut in another way."""
        self._first, self._unseen_bytes, self.whole_bytes = None, 0, 0
        self.uncertain, self._calls, self._book, self._ran = None, KnownCalls(), GapBook(), ()
        self._choices.clear()
        self._waiting.clear()
        self.forget_blocks()

    @property
    def has_run(self) -> bool:
        """Whether a call that consists of blocks has ended."""
        return self._calls.last is not None

    def num_runs(self, blocks: Collection[int]) -> int:
        """Return how often `blocks` have run in the call that is under way."""
        return 0 if self._call is None else sum(block in blocks for block in self._call.blocks)

    def plan(self) -> StepPlan | None:
        """Return the plan of the last sequence, or None if there is none."""
        budget = self.budget_bytes
        if self._calls.last is None or budget is None:
            return None
        found = self._step_plan(self._calls.last, self._ran, budget)
        return replace(found, account=self.around.account(self._calls.last, found.peak_bytes))

    def begin_forward(self, block: int, args: Sequence[Any], parameters: Sequence[Any]) -> Turn:
        """Return what to run of a block that comes next; `args` are the tensors that go in, without parameters."""
        call = self._call
        if call is None:
            call = self._call = Call(tuple)
        self._garbage.free()
        call.enter(args)
        call.spots.append(self._name(block, parameters))
        run = self.around.next_run(None if self.around.layer else self.modules.owner(parameters))
        made, before = self.blocks[block].gradient_bytes, call.leaf_bytes[-1]
        call.runs.append(replace(run, gradient_bytes=made, leaf_bytes=before))
        variant = self._next_variant(call, block)
        call.blocks.append(block)
        call.variants.append(variant)
        call.figures.append(self._figures.of(block).variants[variant])
        call.tangent_bytes.append(sum(self.blocks[block].tangents))
        return Turn(variant, self._remember(call))

    def end_forward(self, turn: Turn, outputs: Sequence[Any]) -> None:
        """Note what a block has returned."""
        self._turns[turn.place][0].leave(outputs)

    def begin_backward(self, turn: Turn, arrived: Arrived) -> None:
        """Note what has happened before the backward of a turn."""
        if turn.place not in self._turns:
            return
        call, place = self._turns[turn.place]
        self._figures.note_arrived(call.blocks[place], arrived)
        call.tangent_bytes[place] = sum(arrived.bytes_of(self.blocks[call.blocks[place]].tangents))
        call.enter_backward(place)

    def end_backward(self, turn: Turn, of_inputs: Sequence[Any], of_parameters: Sequence[Any]) -> None:
        """Note what a backward has returned."""
        if turn.place in self._turns:
            self._turns[turn.place][0].leave_backward(of_inputs, self.around.left_to_watch(of_parameters))

    def _wants_recording(self) -> bool:
        """Return True if the next call should be recorded: the last one was new, and not too many were recorded."""
        last = self._calls.last
        known = last is not None and self._book.is_recorded(last)
        known = known and all(map(self._figures.was_recorded, zip(last or (), self._ran, strict=True)))
        return not known and not self._exploring and self._recordings < SESSION.most_recordings

    def _remember(self, call: Call) -> int:
        """Return a number for the last run of `call`, by which its backward finds it."""
        number = next(self._numbers)
        self._turns[number] = (call, len(call.blocks) - 1)
        return number

    def _forget(self, call: Call) -> None:
        """Look at no further backward of `call`."""
        call.stop_watching()
        self._turns = {key: turn for key, turn in self._turns.items() if turn[0] is not call}
        self._waiting = [each for each in self._waiting if each is not call]

    def _watch_backward(self, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        """Have the backward of `call` noted, from its beginning at one of the outputs to its end."""
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                call.begin_backward()
                after_backward(lambda: self._end_backward(call))

        for output in outputs:
            if output.grad_fn is not None:
                before_backward(output, begin)

    def _end_backward(self, call: Call) -> None:
        """Note that the backward of `call` has ended."""
        self._learn(call, call.end_backward(is_known=self._book.was_run(tuple(call.blocks))))

    def _learn(self, call: Call, shown: Shown | None) -> None:
        """Take over what a whole step has shown."""
        self._forget(call)
        if shown is None:
            return
        self._recordings += shown.recorded
        runs = list(zip(call.blocks, call.variants, strict=True))
        self._figures.note_excess(runs, shown.excess, recorded=shown.recorded)
        self._book.note(tuple(call.blocks), shown.gaps, Basis.RECORDED if shown.recorded else Basis.WATCHED)
        if call is self._first:
            self._note_unplanned(tuple(call.blocks))

    def _note_forward(self, call: Call, sequence: Runs) -> None:
        """Take over what the forward pass of a call has shown, with what is known of its backward."""
        if self._book.of_sequence(sequence) is None:
            backward = expected_backward(self._book, self.blocks, sequence, call)
            self._book.note(sequence, Gaps(tuple(call.forward_gaps), backward), Basis.EXPECTED)

    def _name(self, block: int, parameters: Sequence[Any]) -> Spot | None:
        """Name the block after the module that owns `parameters`; return its place in a list of modules."""
        layer = self.around.layer
        owner = self.modules.owner(parameters) if layer is None else layer.path
        if owner is not None and self.blocks[block].name.startswith("graph "):
            self.blocks[block] = replace(self.blocks[block], name=owner)
        return self.modules.spot(owner)

    def _next_variant(self, call: Call, block: int) -> int:
        """Return the variant for `block`, which comes next in `call`; raise if the step cannot fit with it."""
        budget = self.budget_bytes
        least = self.blocks[block].least
        if budget is None or self._exploring:
            return least
        sequence = self._calls.expect((*call.blocks, block), call.spots[-1], self._weight)
        place = len(call.blocks)
        try:
            if sequence is not None:
                return self._choose(sequence, tuple(call.variants), budget).choice[place]
        except NothingFits:
            # The longest rest may not come: go on with the least as long as what has come fits.
            pass
        return self._least_that_fits(call, block, budget)

    def _least_that_fits(self, call: Call, block: int, budget: int) -> int:
        """Return the variant of `block` that keeps least, of those with which what has run so far fits."""
        sequence = (*call.blocks, block)
        problem = self._problem(sequence, budget)
        menu = self.blocks[block].menu
        for variant in sorted(range(len(menu)), key=lambda each: menu[each].trace.saved_bytes):
            if simulate_step(problem, (*call.variants, variant)).peak_bytes <= budget:
                return variant
        try:
            self._choose(sequence, tuple(call.variants), budget)
        except NothingFits as error:
            found = self._infeasible(error, sequence, budget)
            # All of the call may fit where it was not known how it goes on.
            self.uncertain = found if self._calls.explored is None else None
            raise found from None
        raise AssertionError("a choice fits that no variant is of")

    def _weight(self, rest: Runs) -> int:
        """Return what blocks keep at least."""
        return sum(self.blocks[block].menu[self.blocks[block].least].trace.saved_bytes for block in rest)

    def _choose(self, sequence: Runs, fixed: tuple[int, ...], budget: int) -> StepChoice:
        around = self.around.key(sequence, self._call), self._copied_bytes
        known = budget, self._book.changes, self._figures.changes, around
        return self._choices.choose(sequence, fixed, known, lambda: self._problem(sequence, budget))

    def _problem(self, sequence: Runs, budget: int) -> StepProblem:
        own = expected_gaps(self._book, self.blocks, sequence, self._call)
        own = self._book.with_room(sequence, own, self._unseen_bytes)
        gaps = self.around.add_to(own, sequence, self._call)
        return StepProblem(
            blocks=tuple(map(self._figures.of, range(len(self.blocks)))),
            instances=sequence,
            forward_gaps=with_scalars(holding(gaps.forward, self._copied_bytes)),
            backward_gaps=gaps.backward,
            budget_bytes=budget,
        )

    def _check(self, call: Call) -> None:
        """Raise if the call that has just run does not fit, now that all of it and its budget are known."""
        budget = self.budget_bytes
        assert budget is not None
        sequence = tuple(call.blocks)
        try:
            self._choose(sequence, tuple(call.variants), budget)
        except NothingFits as error:
            found = self._infeasible(error, sequence, budget)
            # What ran while the budget was not known may be in the way; the call can then be made again.
            certain = least_peak(self._problem(sequence, budget)).peak_bytes > budget
            self.uncertain = None if certain else found
            raise found from None

    def _infeasible(self, error: NothingFits, sequence: Runs, budget: int) -> InfeasibleBudgetError:
        problem = self._problem(sequence, budget)
        least = least_peak(problem)
        if least.peak_bytes <= budget:
            # What has run already is in the way.
            least = StepChoice(error.choice, error.least_peak_bytes, 0.0, 0.0, False)
        plan = StepPlan.of(problem, self._menus, least, planner=self._planner, seconds=0.0)
        return infeasible_step(plan, AskedBudget.of(self._budget, budget, whole_bytes=self.whole_bytes))

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """Run blocks for their sequence alone: forward keeps nothing that only backward would read."""
        self._exploring, self.uncertain = True, None
        try:
            yield
        finally:
            self._exploring = False

    @property
    def keeps_values(self) -> bool:
        """False while blocks run for their sequence alone."""
        return not self._exploring

    def refusal(self) -> InfeasibleBudgetError | None:
        """Return why the sequence that was explored does not fit the budget, or None if it does."""
        budget = self.budget_bytes
        assert budget is not None
        assert self._calls.last is not None
        try:
            self._choose(self._calls.last, (), budget)
        except NothingFits as error:
            return self._infeasible(error, self._calls.last, budget)
        self._calls.explored = self._calls.last
        return None

    def _step_plan(self, sequence: Runs, ran: tuple[int, ...], budget: int) -> StepPlan:
        """Return what the last step was: its variants, priced with all that is known by now."""
        problem = self._problem(sequence, budget)
        trace = simulate_step(problem, ran)
        try:
            bound = min(self._choose(sequence, (), budget).bound_seconds, trace.seconds)
        except NothingFits:
            bound = 0.0
        chosen = StepChoice(ran, trace.peak_bytes, trace.seconds, bound, trace.seconds <= bound)
        seconds = self._choices.seconds + sum(plan.seconds for menu in self._menus for plan in menu)
        return StepPlan.of(problem, self._menus, chosen, planner=self._planner, seconds=seconds)

    @property
    def _menus(self) -> list[tuple[Plan, ...]]:
        return [block.plans for block in self.blocks]

    @property
    def _planner(self) -> str:
        """The planner of the menus, whose first plans are those that keep everything."""
        return next((menu[-1].planner for menu in self._menus if len(menu) > 1), "keep_all")
