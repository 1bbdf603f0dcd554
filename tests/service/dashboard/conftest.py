"""Pages read through functions whose own tests run on both databases."""

import pytest

from tests.examples import deep


@pytest.fixture(params=["sqlite", deep("postgres")])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database; on PostgreSQL `make test-deep` shows pages."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
