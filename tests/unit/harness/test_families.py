"""The table of docs/models.md, as far as no engine is needed."""

from tests.families.families import FAMILIES, TRAINED
from tests.families.page import PAGE, ROOT, TABLE


def test_models_page_matches_families() -> None:
    rows = PAGE.read_text().partition(TABLE)[2].partition("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [family.models for family in FAMILIES]
    for family, row in zip(FAMILIES, rows, strict=True):
        test = TRAINED.get(family.model_type)
        assert ("trained and verified" in row) is (test is not None)
        assert test is None or f"(`{test}`)" in row
        assert bool(family.reason) is ("not looked at" in row)
    assert {*TRAINED} <= {family.model_type for family in FAMILIES}
    assert all((ROOT / "tests" / "multiprocess" / test).exists() for test in TRAINED.values())
