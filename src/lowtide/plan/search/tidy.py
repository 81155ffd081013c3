"""Taking out repeated runs that the limit does not ask for."""

from __future__ import annotations

from lowtide.plan.search.draft import Draft, Facts, strip
from lowtide.plan.search.pricer import Pricer
from lowtide.plan.search.survey import Survey


def tidy(facts: Facts, pricer: Pricer, draft: Draft, limit: float) -> Draft:
    """Return `draft` without the repeated runs that can go while its peak stays within `limit`, dearest first."""
    while True:
        smaller = _one_pass(facts, pricer, draft, limit)
        if len(smaller.steps) == len(draft.steps):
            return smaller
        draft = smaller


def _one_pass(facts: Facts, pricer: Pricer, draft: Draft, limit: float) -> Draft:
    draft, events = strip(facts, pricer, draft)
    survey = Survey(facts, draft, events, limit)
    # Steps move when others go, so each is known by a tag: its place at the start of the pass.
    tags = list(range(len(draft.steps)))
    place = dict(zip(tags, tags, strict=True))
    price = [facts.seconds[op] for op in draft.steps]
    for tag in sorted(draft.repeats(), key=lambda step: (-price[step], step)):
        step = place.get(tag, -1)
        if step < 0 or not _plausible(survey, step):
            continue
        left = tags[:step] + tags[step + 1 :]
        trial, events = strip(facts, pricer, draft.remove({step}), left)
        if events.peak <= limit:
            draft, tags = trial, left
            place = {kept: index for index, kept in enumerate(tags)}
            survey = Survey(facts, draft, events, limit)
    return draft


def _plausible(survey: Survey, step: int) -> bool:
    """Whether taking out the run at `step` may keep within the limit, judged from the gaps it closes.

    The repeated runs just before it are likely to be there for its sake and to go with it, so they do not count.
    """
    facts, steps = survey.facts, survey.draft.steps
    op = steps[step]
    start = step
    while start and survey.again[start - 1]:
        start -= 1
    ending = sum(facts.bytes[value] for value in facts.reads[op] if survey.near(value, step + 1).next_read < 0)
    for value in facts.writes[op]:
        if survey.near(value, step + 1).next_read < 0:
            continue
        last = survey.near(value, step).last
        if survey.highest(last + 1, start) + facts.bytes[value] - ending > survey.limit:
            return False
    return True
