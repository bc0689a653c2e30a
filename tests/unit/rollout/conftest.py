import pytest

from .scripted import forget_tasks


@pytest.fixture(autouse=True)
def no_tasks_left():
    yield
    forget_tasks()
