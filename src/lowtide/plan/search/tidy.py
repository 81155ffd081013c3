"""Taking out repeated runs that the limit does not ask for."""

from __future__ import annotations

from lowtide.plan.search.draft import Draft, Facts, useless
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
    draft = draft.remove(useless(facts, draft))
    survey = Survey(facts, pricer, draft, limit)
    # Steps move when others go, so runs are tracked by a tag: their place at the start of the pass.
    tags = list(range(len(draft.steps)))
    place = {tag: tag for tag in tags}
    for tag in sorted(draft.repeats(), key=lambda step: (-facts.seconds[draft.steps[step]], step)):
        if tag not in place or not _plausible(survey, place[tag]):
            continue
        trial = draft.remove({place[tag]})
        idle = useless(facts, trial)
        trial = trial.remove(idle) if idle else trial
        if pricer.events(trial.steps, trial.split).peak > limit:
            continue
        draft = trial
        del tags[place[tag]]
        tags = [kept for index, kept in enumerate(tags) if index not in idle]
        place = {kept: index for index, kept in enumerate(tags)}
        survey = Survey(facts, pricer, draft, limit)
    return draft


def _plausible(survey: Survey, step: int) -> bool:
    """Whether taking out the run at `step` may keep within the limit, judged from the gaps it closes.

    The repeated runs just before it are likely to be there for its sake and to go with it, so they do not count.
    """
    facts, steps = survey.facts, survey.draft.steps
    op = steps[step]
    start = step
    while start - 1 in survey.repeats:
        start -= 1
    ending = sum(facts.bytes[value] for value in facts.reads[op] if survey.near(value, step + 1).next_read < 0)
    for value in facts.writes[op]:
        if survey.near(value, step + 1).next_read < 0:
            continue
        last = survey.near(value, step).last
        if survey.highest(last + 1, start) + facts.bytes[value] - ending > survey.limit:
            return False
    return True
