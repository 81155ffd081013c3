"""The picture of the import graph: every part has a place of its own, arrows point down and pass nothing but space."""

from itertools import pairwise

import pytest

from lowtide.testing.import_graph import arrange, draw, edges, heights, lines, module_imports, torch_users

PARTS = {"top": {"middle", "leaf"}, "middle": {"bottom"}, "bottom": {"floor"}, "floor": set(), "leaf": {"floor"}}


def test_a_part_stands_right_below_the_lowest_that_imports_it():
    assert heights(PARTS) == {"top": 3, "middle": 2, "leaf": 2, "bottom": 1, "floor": 0}


@pytest.mark.parametrize("parts", [PARTS, edges("lowtide", module_imports())], ids=["small", "lowtide"])
def test_arrows_point_down_and_no_two_places_overlap(parts):
    row_of = heights(parts)
    assert all(row_of[other] < row_of[part] for part, others in parts.items() for other in others)
    arrows = lines(parts, row_of)
    rows = {}
    for place, x in arrange(row_of, arrows).items():
        rows.setdefault(row_of[place] if isinstance(place, str) else place[2], []).append((x, place))
    for row in rows.values():
        for (left, one), (right, other) in pairwise(sorted(row, key=lambda pair: pair[0])):
            widths = [len(place) if isinstance(place, str) else 0 for place in (one, other)]
            assert right - left > sum(widths) / 2
    # An arrow has a place in every row that it passes.
    for arrow in arrows:
        assert len(arrow) == 1 + row_of[arrow[0]] - row_of[arrow[-1]]


def test_planning_works_without_torch_and_capturing_does_not():
    parts = edges("lowtide", module_imports())
    users = torch_users("lowtide", parts)
    assert not users & {"graph", "schedule", "plan", "analysis", "report"}
    assert users >= {"pytorch", "capture", "runtime", "settings"}


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path / "images" / "imports.png")
    assert (tmp_path / "images" / "imports.png").read_bytes().startswith(b"\x89PNG")
