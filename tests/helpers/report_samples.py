"""Plans to report on: small ones, and one whose names attack the page."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from lowtide import Costs, Graph, Plan, Problem, solve
from lowtide.analysis.planner_comparison import Comparison, compare_planners
from lowtide.graph.samples import unet

HOSTILE = (
    "<img src=x onerror='window.attacked=1'>",
    '"><script>window.attacked=1</script>',
    "</script><script>window.attacked=1</script>",
    "{{ 7 * 7 }}{% for %}",
    "a&amp;b \u2028 日本 'quoted' \\",
    "x" * 300,
)


def named(graph: Graph, modules: tuple[str, ...], sources: tuple[str, ...]) -> Graph:
    """Return `graph` with modules and source lines, taken in turn."""
    ops = tuple(
        replace(op, module=modules[index % len(modules)], source=sources[index % len(sources)])
        for index, op in enumerate(graph.ops)
    )
    return replace(graph, ops=ops)


def plain_names() -> Graph:
    sample, _ = unet(6, size=2**20)
    return named(sample, ("down.0", "down.1", "middle", "up.0"), ("/home/me/net.py:10", "/home/me/net.py:20"))


def hostile_names() -> Graph:
    sample, _ = unet(6, size=2**20)
    return named(sample, HOSTILE, tuple(f"{name}:1" for name in HOSTILE))


def plan_of(graph: Graph, share: float = 0.6) -> Plan:
    costs = Costs(tuple(0.001 * (1 + index % 3) for index in range(len(graph.ops))), (8,) * len(graph.ops), "test")
    peak = Problem(graph, costs, 1).baseline.peak_bytes
    return solve(Problem(graph, costs, int(share * peak)), "greedy")


def comparison_of(plan: Plan) -> Comparison:
    problem = plan.problem
    return compare_planners(
        problem.graph, problem.costs, budgets=["90%", "70%", "60%"], planners=["greedy", "chen_sqrt", "keep_all"]
    )


class Reader(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        if self.inside == "data":
            self.data.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
