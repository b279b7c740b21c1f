import pytest
from mutations import MUTATIONS, ROOT, TABLE, applied


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.what)
def test_every_mutation_still_applies(mutation):
    source = (ROOT / mutation.file).read_text()
    assert applied(mutation, source) != source
    path = mutation.tests.split()[0]
    assert (ROOT / path).is_file()


def test_the_table_has_every_mutation():
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [m.what for m in MUTATIONS]
    assert not any("none" in row.rsplit(" | ")[-1].split("`")[0] for row in rows)
