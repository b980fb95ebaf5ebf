"""What is judged how, as tables: a provider, a consumer, and the findings that are not plainly compatible."""

from collections.abc import Callable

import pytest

from draftmill.contract.findings import Finding

Pair = Callable[..., list[Finding]]
Expected = list[tuple[str, str, int]]

# (provider, consumer, [(verdict, kind, the consumer's line)])
CASES: dict[str, tuple[str, str, Expected]] = {
    "import of a name that is gone": ("", "from provider import f\n", [("broken", "missing target", 1)]),
    "import of a module that is gone": ("", "import provider.core\n", [("broken", "missing target", 1)]),
    "the consumer expects the import to fail": (
        "",
        "try:\n    from provider import f\nexcept ImportError:\n    f = None\n",
        [],
    ),
    "not reached: the first of two imports works": (
        "def f(): ...\n",
        "try:\n    from provider import f\nexcept ImportError:\n    from provider.old import f\n",
        [],
    ),
    "reached: the second of two imports": (
        "",
        "try:\n    from provider import f\nexcept ImportError:\n    from provider.old import f\n",
        [("broken", "missing target", 4)],
    ),
    "not reached: only for type checkers": (
        "",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from provider import f\n",
        [],
    ),
    "not reached: hasattr of an attribute that a class below may have": (
        "class A: ...\n",
        "from provider import A\nclass B(A):\n    def f(self):\n        if hasattr(self, 'x'):\n            self.x\n",
        [],
    ),
    "not reached: getattr with a default": (
        "class A: ...\n",
        "from provider import A\na = A()\nif getattr(a, 'x', None):\n    a.x\n",
        [],
    ),
    "a walrus hides the loop's variable": (
        "class A:\n    x: int\nclass B: ...\ndef f() -> list[B]: ...\ndef g() -> A: ...\n",
        "from provider import f, g\ndef h():\n    for one in f():\n        pass\n"
        "    if one := g():\n        return one.x\n    return one.y\n",
        [("broken", "missing attribute", 7)],
    ),
    "not reached: hasattr": ("", "import provider\nif hasattr(provider, 'f'):\n    provider.f()\n", []),
    "reached: hasattr, negated": (
        "",
        "import provider\nif not hasattr(provider, 'f'):\n    provider.f()\n",
        [("broken", "missing attribute", 3)],
    ),
    "not reached: an older version": (
        "__version__ = '2.0'\n",
        "import provider\nfrom packaging.version import Version\n"
        "if Version(provider.__version__) < Version('1.5'):\n    provider.f()\n",
        [],
    ),
    "reached: this version": (
        "__version__ = '2.0'\n",
        "import provider\nfrom packaging.version import Version\n"
        "if Version(provider.__version__) >= Version('1.5'):\n    provider.f()\n",
        [("broken", "missing attribute", 4)],
    ),
    "several faults of one call": (
        "def f(a, b): ...\n",
        "from provider import f\nf(a=1, c=2)\n",
        [("broken", "missing argument", 2)],
    ),
    "arguments that the source does not show": (
        "def f(a, b): ...\n",
        "from provider import f\ndef g(*args, **kwargs):\n    f(*args, **kwargs)\n",
        [],
    ),
    "a dict written out": (
        "def f(a, b=1): ...\n",
        "from provider import f\noptions = {'a': 1, 'c': 2}\nf(**options)\n",
        [("broken", "unknown argument", 3)],
    ),
    "either branch of the provider fits": (
        "import sys\nif sys.platform == 'linux':\n    def f(a): ...\nelse:\n    def f(a, b): ...\n",
        "from provider import f\nf(1)\n",
        [],
    ),
    "no branch of the provider fits": (
        "import sys\nif sys.platform == 'linux':\n    def f(a): ...\nelse:\n    def f(a, b): ...\n",
        "from provider import f\nf()\n",
        [("broken", "missing argument", 2)],
    ),
    "a value that nothing describes": (
        "def f(): return g()\n",
        "from provider import f\nf().x.y\n",
        [("unresolved", "", 2)],
    ),
    "an attribute that a getter may give": (
        "class A:\n    def __getattr__(self, name): return 1\n",
        "from provider import A\nA().x\n",
        [("unresolved", "", 2)],
    ),
    "a getter that hands on": (
        "class B:\n    x: int\nclass A:\n    def __init__(self):\n        self.b = B()\n"
        "    def __getattr__(self, name): return getattr(self.b, name)\n",
        "from provider import A\nA().x\nA().y\n",
        [("unresolved", "", 3)],
    ),
    "a base outside both": (
        "from elsewhere import Base\nclass A(Base): ...\n",
        "from provider import A\nA().x\n",
        [("unresolved", "", 2), ("unresolved", "", 2)],
    ),
    "an attribute of torch's own": (
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self): ...\n    def forward(self, x): return x\n",
        "from provider import A\na = A()\na.eval()\na(1)\na(1, 2)\na.missing\n",
        [("broken", "too many positionals", 5), ("broken", "missing attribute", 6)],
    ),
    "one of a union": (
        "class A:\n    x: int\nclass B: ...\ndef f() -> A | B: ...\n",
        "from provider import f\nf().x\n",
        [],
    ),
    "any that a type guard lets through": (
        "from typing import Protocol, TypeIs\nclass P(Protocol): ...\nclass A(P):\n    x: int\nclass B(P): ...\n"
        "def is_p(v: object) -> TypeIs[P]: ...\n",
        "from provider import is_p\ndef g(v):\n    if not is_p(v):\n        raise ValueError\n    return v.x\n",
        [("broken", "missing attribute", 5)],
    ),
    "an attribute that only a class below has": (
        "class A: ...\nclass B(A):\n    x: int\ndef f() -> A: ...\n",
        "from provider import f\nf().x\n",
        [("unresolved", "", 2)],
    ),
    "isinstance narrows": (
        "class A: ...\nclass B(A):\n    x: int\ndef f() -> A: ...\n",
        "from provider import B, f\na = f()\nif isinstance(a, B):\n    a.x\n    a.y\n",
        [("broken", "missing attribute", 5)],
    ),
    "an override that no call breaks": (
        "class A:\n    def f(self, a, b=None): ...\n    def run(self): self.f(1)\n",
        "from provider import A\nclass B(A):\n    def f(self, a): ...\n",
        [],
    ),
    "an override that a call breaks": (
        "class A:\n    def f(self, a, b=None): ...\n    def run(self): self.f(1, b=2)\n",
        "from provider import A\nclass B(A):\n    def f(self, a): ...\n",
        [("broken", "override mismatch", 3)],
    ),
    "an override beside a class whose calls differ": (
        "class A:\n    def f(self, a, b=None): ...\nclass C(A):\n    def run(self): self.f(1, b=2)\n",
        "from provider import A\nclass B(A):\n    def f(self, a): ...\n",
        [],
    ),
    "an override like another of the provider's, which that call is not for": (
        "class A:\n    def f(self, a): ...\nclass C(A):\n    def f(self, a, b): ...\n"
        "class D(A):\n    def f(self, a, b): ...\ndef run(x: A): x.f(1)\n",
        "from provider import D\nclass B(D):\n    def f(self, a, b): ...\nclass E(B):\n    def f(self, a, b, c): ...\n",
        [],
    ),
    "an attribute that only a class of the consumer's own has": (
        "class A: ...\ndef make() -> A: ...\n",
        "from provider import A, make\nclass B(A):\n    x: int = 0\nmake().x\nmake().y\n",
        [("unresolved", "", 4), ("broken", "missing attribute", 5)],
    ),
    "a call that only the consumer's own override takes": (
        "class A:\n    def f(self, a): ...\ndef make() -> A: ...\n",
        "from provider import A, make\nclass B(A):\n    def f(self, a, b=None): ...\nmake().f(1, b=2)\n"
        "make().f(1, c=2)\n",
        [("unresolved", "", 4), ("broken", "unknown argument", 5)],
    ),
    "hasattr tells the options of a value apart": (
        "class A:\n    x: int\nclass B:\n    y: int\ndef f() -> A | B: ...\n",
        "from provider import f\none = f()\nif hasattr(one, 'x'):\n    one.x, one.y\nelse:\n    one.y, one.x\n",
        [("broken", "missing attribute", 4), ("broken", "missing attribute", 6)],
    ),
    "super() and its constructor": (
        "class A:\n    def __init__(self, a): ...\n",
        "from provider import A\nclass B(A):\n    def __init__(self):\n        super().__init__()\n",
        [("broken", "missing argument", 4)],
    ),
    "a coroutine": (
        "class A:\n    async def f(self) -> 'A': ...\n",
        "from provider import A\nasync def g():\n    (await A().f()).f()\n    (await A().f()).gone()\n",
        [("broken", "missing attribute", 4)],
    ),
    "an awaited call by name": (
        "class A:\n    async def collective_rpc(self, method, args=()): ...\n"
        "class WorkerBase:\n    def f(self) -> int: ...\n",
        "from provider import A\nasync def g():\n    for one in await A().collective_rpc('f'):\n        one\n",
        [],
    ),
    "a result that is an index": (
        "def f() -> int: ...\n",
        "from provider import f\nat = f()\nprint([1, 2][at], at[0])\n",
        [("broken", "return shape", 2)],
    ),
    "a result that is only an index": (
        "def f() -> int: ...\n",
        "from provider import f\nat = f()\nprint([1, 2][at], [1][f()])\n",
        [],
    ),
    "a class's decorator that replaces its constructor": (
        "def make(cls):\n    old = cls.__init__\n    def __init__(self, *, a): old(self, a)\n"
        "    cls.__init__ = __init__\n    return cls\n"
        "def decorated(*, flag): return lambda cls: make(cls)\n"
        "@decorated(flag=1)\nclass A:\n    def __init__(self, a): ...\n",
        "from provider import A\nA(1)\nA(a=1)\nclass B(A):\n    def __init__(self):\n        super().__init__(1)\n",
        [("broken", "too many positionals", 2), ("broken", "too many positionals", 6)],
    ),
    "a frozen enum's member": (
        "from enum import Enum\nclass E(Enum):\n    A = 1\n",
        "from provider import E\nE.A.value\nE.B\n",
        [("broken", "missing attribute", 3)],
    ),
    "an attribute of the consumer's own on a foreign object": (
        "class A: ...\n",
        "from provider import A\na = A()\na.mine = 1\nprint(a.mine)\n",
        [],
    ),
    "a function that nothing has is replaced": (
        "def g(): ...\n",
        "import provider\ndef f(): ...\nprovider.f = f\n",
        [("broken", "missing target", 3)],
    ),
    "a class named in a string": (
        "class Config:\n    def __init__(self, worker_cls=None): ...\n",
        "from provider import Config\nConfig(worker_cls='consumer.Gone')\n",
        [("broken", "missing target", 2)],
    ),
    "a decorator that may change a signature": (
        "import elsewhere\n@elsewhere.wrapped\ndef f(a): ...\n",
        "from provider import f\nf()\n",
        [("unresolved", "", 2)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(pair: Pair, name: str) -> None:
    provider, consumer, expected = CASES[name]
    found = [(f.verdict, f.kind, f.consumer.line) for f in pair(provider, consumer) if f.verdict != "compatible"]
    assert found == expected, [(f.consumer.line, f.use, f.message) for f in pair(provider, consumer)]


def test_every_fault_of_a_call_is_told_in_python_s_words(pair: Pair) -> None:
    finding = pair("def f(a, b): ...\n", "from provider import f\nf(a=1, c=2)\n")[-1]
    assert "got an unexpected keyword argument 'c'" in finding.message
    assert "missing a required argument: 'b'" in finding.message


def test_the_definitions_of_one_name_are_told_apart(pair: Pair) -> None:
    provider = {
        "executor.py": "class Base:\n    def begin(self, configs: list[int]) -> None: ...\nclass Executor(Base): ...\n",
        "worker.py": "class Worker:\n    def begin(self, config: int) -> None: ...\n",
    }
    finding = pair(provider, "from provider.executor import Executor\nExecutor().begin([1])\n")[-1]
    assert finding.verdict == "compatible" and str(finding.provider) == "provider/executor.py:2"
    assert [step.partition(" (")[0] for step in finding.path[:2]] == [
        "provider.executor.Executor",
        "provider.executor.Base",
    ]
    assert finding.path[2].startswith("not provider.worker.Worker.begin(config: int)")


def test_evidence_names_both_lines_and_the_signature(pair: Pair) -> None:
    finding = pair("\n\ndef f(a: int, *, b: str = 'x') -> None: ...\n", "from provider import f\n\nf(1)\n")[-1]
    assert (str(finding.consumer), str(finding.provider)) == ("consumer/__init__.py:3", "provider/__init__.py:3")
    assert finding.signature == "provider.f(a: int, *, b: str = 'x') -> None"


def test_a_class_below_is_found_under_the_name_that_an_import_gave_its_base(pair: Pair) -> None:
    provider = {
        "old.py": "class Worker: ...\n",
        "new.py": "from provider.old import Worker as Before\nclass Worker(Before):\n    runner: int = 0\n",
    }
    consumer = "from provider.old import Worker\ndef f(worker: Worker):\n    worker.runner\n    worker.walker\n"
    found = [(f.verdict, f.consumer.line) for f in pair(provider, consumer)]
    assert found[-2:] == [("unresolved", 3), ("broken", 4)]
