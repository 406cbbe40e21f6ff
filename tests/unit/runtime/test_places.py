"""Where a release and its Python lie: where the service's user finds them."""

import os

import pytest
from pdstack import release, venv


def test_a_python_that_the_units_cannot_see_is_refused(fake, tmp_path):
    """ProtectHome=yes: the installation succeeded and every unit ended with status 203/EXEC."""
    elsewhere = os.path.dirname(os.path.realpath(next(fake.search.iterdir())))
    for hidden, subject in ((elsewhere, "python"), (str(tmp_path), "root")):
        with pytest.raises(release.ReleaseRefused) as caught:
            venv.apply(fake.request(), fake.host(hidden=(hidden,)))
        (found,) = [item for item in caught.value.refusals if item.subject == subject]
        assert found.found.startswith(hidden)
        assert "ProtectHome" in found.needed
        assert not (fake.root / "current").exists()
