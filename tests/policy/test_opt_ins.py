"""What only runs when an environment variable asks for it stands on one page, or nobody ever asks."""

import re

import pytest
from policy import tree

PAGE = tree.ROOT / "docs/testing.md"
# Read by what is deployed or measured, and set, not asked, in tests.
NOT_ASKED = {
    "PDSTACK_KERNELS": "the engine's plugin",
    "PDSTACK_KERNELS_REPORT": "the engine's plugin",
    "PDSTACK_NUDGE": "a stand-in of the compared engine",
    "PDSTACK_GPU_FOUND": "tools/gpu_evidence sets it for its tests",
    "PDSTACK_CREDENTIALS": "launch.py",
}
READS = re.compile(
    r"""environ(?:\.get)?[(\[]\s*["'](PDSTACK_\w+)|\benv', '(PDSTACK_\w+)|\$\{(PDSTACK_\w+)|: "(PDSTACK_\w+)"""
)


def asked(text):
    """The variables that a test, a scenario or a script reads from its environment."""
    return {name for names in READS.findall(text) for name in names if name}


def everywhere():
    paths = tree.matching("tests/**/*.py", "kernels/tests/*.py", "molecule/**/*.yml", "molecule/**/*.py", "tools/setup")
    texts = [path.read_text() for path in paths if path.name != "test_opt_ins.py"]
    return set().union(*map(asked, texts)) - set(NOT_ASKED)


def test_each_is_on_the_page_and_the_page_names_no_other():
    assert {"PDSTACK_LONG", "PDSTACK_GPU", "PDSTACK_GPU_MODE", "PDSTACK_GPU_INVENTORY"} < everywhere()
    assert set(re.findall(r"PDSTACK_\w+", PAGE.read_text())) == everywhere()


def test_each_test_module_that_waits_for_one_is_on_the_page():
    modules = [path for path in tree.matching("tests/**/test_*.py") if path.name != "test_opt_ins.py"]
    waits = [path for path in modules if re.search(r"environ[^\n]*PDSTACK_LONG", path.read_text())]
    named = PAGE.read_text()
    assert len(waits) > 8
    assert [path.name for path in waits if path.name not in named] == []


@pytest.mark.parametrize(
    "text",
    [
        'os.environ.get("PDSTACK_A")',
        'os.environ["PDSTACK_A"]',
        "lookup('ansible.builtin.env', 'PDSTACK_A')",
        "path: ${PDSTACK_A:-inventory/}",
        'NEEDS = {"gpu": "PDSTACK_A"}',
    ],
)
def test_a_variable_is_seen_however_it_is_read(text):
    assert asked(text) == {"PDSTACK_A"}
    assert asked("PDSTACK_A=1 make test") == set()
