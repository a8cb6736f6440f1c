"""The settings of hypothesis: the same examples in every run, as many as a number of seconds allows."""

from hypothesis import HealthCheck, settings

FEW = settings(
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
