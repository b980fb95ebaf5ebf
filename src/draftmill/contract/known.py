"""What is known of things outside both packages, and of how vLLM calls by name. Data, so that a new case is a new
row."""

import abc
import collections
import collections.abc
import concurrent.futures
import contextlib
import enum
import threading

STANDARD = {
    "object": object,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "set": set,
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "bytes": bytes,
    "type": type,
    "BaseException": BaseException,
    "Exception": Exception,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "KeyError": KeyError,
    "NotImplementedError": NotImplementedError,
    "AttributeError": AttributeError,
    "ImportError": ImportError,
    "TimeoutError": TimeoutError,
    "abc.ABC": abc.ABC,
    "abc.ABCMeta": abc.ABCMeta,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.UserDict": collections.UserDict,
    "collections.UserList": collections.UserList,
    "collections.deque": collections.deque,
    "collections.defaultdict": collections.defaultdict,
    "concurrent.futures.Future": concurrent.futures.Future,
    "contextlib.AbstractContextManager": contextlib.AbstractContextManager,
    "contextlib.ContextDecorator": contextlib.ContextDecorator,
    "enum.Enum": enum.Enum,
    "enum.IntEnum": enum.IntEnum,
    "enum.StrEnum": enum.StrEnum,
    "enum.Flag": enum.Flag,
    "enum.IntFlag": enum.IntFlag,
    "threading.Thread": threading.Thread,
    "typing.Generic": object,
    "typing.Protocol": object,
    "typing_extensions.Protocol": object,
    "typing.NamedTuple": tuple,
    "typing.TypedDict": dict,
    "typing_extensions.TypedDict": dict,
    **{f"typing.{name}": getattr(collections.abc, name) for name in ("Mapping", "Sequence", "Iterator", "Iterable")},
    **{f"collections.abc.{name}": getattr(collections.abc, name) for name in collections.abc.__all__},
}

_MODULE = """T_destination add_module append apply bfloat16 buffers call_super_init children compile cpu cuda double
dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu
load_state_dict modules mtia named_buffers named_children named_modules named_parameters parameters
register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to
to_empty train training type xpu zero_grad _apply _buffers _call_impl _load_from_state_dict _modules
_parameters _save_to_state_dict _forward_hooks _backward_hooks"""
_MODEL = """construct copy dict from_orm json model_computed_fields model_config model_construct model_copy model_dump
model_dump_json model_extra model_fields model_fields_set model_json_schema model_parametrized_name
model_post_init model_rebuild model_validate model_validate_json model_validate_strings parse_file parse_obj
parse_raw schema schema_json update_forward_refs validate __pydantic_fields_set__"""


def _members(kind: type) -> frozenset[str]:
    return frozenset(("name", "value", "_name_", "_value_") if issubclass(kind, enum.Enum) else ())


# Attributes of classes outside, which many classes inherit: torch 2, pydantic 2, msgspec.
ATTRIBUTES: dict[str, frozenset[str]] = {
    "torch.nn.Module": frozenset(_MODULE.split()),
    "torch.nn.modules.module.Module": frozenset(_MODULE.split()),
    "pydantic.BaseModel": frozenset(_MODEL.split()),
    "pydantic.main.BaseModel": frozenset(_MODEL.split()),
    "msgspec.Struct": frozenset(),
    **{name: frozenset(dir(kind)) | _members(kind) for name, kind in STANDARD.items()},
}
MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module")  # calling an instance runs its `forward`
NETWORKS = "torch.nn."  # what stands below it, in capitals, is such a module too
MODELS = ("pydantic.BaseModel", "pydantic.main.BaseModel", "pydantic_settings.BaseSettings")
ENUMS = tuple(f"enum.{name}" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"))

# Decorators outside that keep a function's signature.
KEEPING = {
    "staticmethod",
    "classmethod",
    "property",
    "abc.abstractmethod",
    "abc.abstractproperty",
    "functools.cached_property",
    "functools.lru_cache",
    "functools.cache",
    "functools.wraps",
    "functools.singledispatch",
    "functools.singledispatchmethod",
    "contextlib.contextmanager",
    "contextlib.asynccontextmanager",
    "typing.overload",
    "typing.final",
    "typing.dataclass_transform",
    "typing_extensions.dataclass_transform",
    "typing.no_type_check",
    "typing.override",
    "typing.runtime_checkable",
    "typing_extensions.deprecated",
    "typing_extensions.override",
    "typing_extensions.overload",
    "typing_extensions.final",
    "warnings.deprecated",
    "torch.no_grad",
    "torch.inference_mode",
    "torch.compile",
    "torch.jit.script",
    "torch.library.custom_op",
    "torch.compiler.disable",
    "torch._dynamo.disable",
    "pydantic.field_validator",
    "pydantic.model_validator",
    "pydantic.validator",
    "pydantic.root_validator",
    "pydantic.computed_field",
    "atexit.register",
}
PROPERTIES = {"property", "functools.cached_property", "abc.abstractproperty", "pydantic.computed_field"}

# vLLM's calls by name: the method that takes a name -> the classes on which it is looked up, in that order.
REMOTE = {"collective_rpc": ("WorkerWrapperBase", "WorkerBase")}
# A keyword that takes a class's dotted name -> the class into whose bases it is put.
HOSTS = {"worker_extension_cls": "WorkerBase"}

GENERIC_SEQUENCES = {
    *("list", "set", "frozenset", "List", "Set", "FrozenSet", "Sequence", "Iterable", "Iterator", "Collection"),
    *(
        "MutableSequence",
        "deque",
        "Deque",
        "Generator",
        "AsyncGenerator",
        "AsyncIterator",
        "AsyncIterable",
        "Reversible",
    ),
    *("AbstractSet", "MutableSet", "KeysView", "ValuesView", "Queue"),
}
GENERIC_MAPS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict", "DefaultDict"}
TRANSPARENT = {"Annotated", "ClassVar", "InitVar", "Final", "Required", "NotRequired", "ReadOnly", "Optional"}
AWAITABLES = {"Awaitable", "Coroutine"}
CONTEXTS = {"AbstractContextManager", "ContextManager", "AbstractAsyncContextManager", "AsyncContextManager"}
GUARDS = {"TypeGuard", "TypeIs"}
