"""`make test` runs every test once, whatever part it is in."""

from tests.__main__ import BESIDE, IN_TURN, ROOT, others


def test_every_module_of_tests_is_in_one_part() -> None:
    places = [place for part in (*IN_TURN, others(), *BESIDE) for place in part]
    modules = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(modules) > 300
    parts = {module: [place for place in places if f"{module}/".startswith(f"{place}/")] for module in modules}
    assert {module: found for module, found in parts.items() if len(found) != 1} == {}
