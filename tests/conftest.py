"""Make the targets' package importable under both of its names, as one set of modules.

Tests import `pdstack`; our modules and plugins import `ansible.module_utils.pdstack`. Two copies in one process would
give two of each class, and `isinstance` would say no to an equal one. So the long name answers with the short one's
modules.
"""

import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONG_NAME = "ansible.module_utils.pdstack"


class OnePackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ansible.module_utils.pdstack[.x] by importing pdstack[.x]."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == LONG_NAME or fullname.startswith(LONG_NAME + "."):
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec):
        module = importlib.import_module(spec.name[len("ansible.module_utils.") :])
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.own_spec  # the import system has just put the long name's there


sys.path.insert(0, str(ROOT / "module_utils"))
sys.meta_path.insert(0, OnePackage())


@pytest.fixture(scope="session")
def project_root() -> pathlib.Path:
    return ROOT
