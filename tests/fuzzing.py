"""How hypothesis is used here: the same examples in every run, and as many as seconds allow."""

from hypothesis import HealthCheck, settings

FEW = settings(
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
