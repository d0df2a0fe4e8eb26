"""libdcmi.so: the calls that are used, their arguments, and what their codes mean.

Signatures and structures after Huawei's dcmi_interface_api.h. Runs in a child process only, since
a call may hang or end the process that makes it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char, c_int, c_ubyte, c_uint, c_ulong, c_ulonglong
from typing import Any

UNSUPPORTED = -8255
RETRY_S = 600.0  # until a call that the device refused is tried again
MAX_CARDS = 64
MAX_CODES = 128
MAX_PROCESSES = 64


class ChipInfo(ctypes.Structure):
    _fields_ = (
        ("chip_type", c_char * 32),
        ("chip_name", c_char * 32),
        ("chip_version", c_char * 32),
        ("num_cores", c_uint),
    )


class PcieInfo(ctypes.Structure):
    _fields_ = (
        ("vendor", c_uint),
        ("subvendor", c_uint),
        ("device", c_uint),
        ("subdevice", c_uint),
        ("domain", c_int),
        ("bus", c_uint),
        ("slot", c_uint),
        ("function", c_uint),
        ("reserved", c_ubyte * 32),
    )


class MemoryInfo(ctypes.Structure):
    """Sizes in MiB, available with free huge pages."""

    _fields_ = (
        ("size", c_ulonglong),
        ("available", c_ulonglong),
        ("megahertz", c_uint),
        ("hugepage_kib", c_ulong),
        ("hugepages", c_ulong),
        ("hugepages_free", c_ulong),
        ("percent", c_uint),
        ("reserved", c_ubyte * 60),
    )


class HbmInfo(ctypes.Structure):
    """Sizes in MiB."""

    _fields_ = (
        ("size", c_ulonglong),
        ("megahertz", c_uint),
        ("used", c_ulonglong),
        ("celsius", c_int),
        ("bandwidth_percent", c_uint),
    )


class EccInfo(ctypes.Structure):
    _fields_ = (
        ("enabled", c_int),
        ("single_bit", c_uint),
        ("double_bit", c_uint),
        ("total_single_bit", c_uint),
        ("total_double_bit", c_uint),
        ("single_bit_pages", c_uint),
        ("double_bit_pages", c_uint),
    )


class ProcessInfo(ctypes.Structure):
    _fields_ = (("pid", c_int), ("used_bytes", c_ulong))


class SensorInfo(ctypes.Union):
    """Of the thermal threshold: where the chip slows down, and where the card resets it."""

    _fields_ = (("celsius", ctypes.c_byte * 2), ("words", c_uint * 16))


_INT, _UINT = POINTER(c_int), POINTER(c_uint)
_CHIP = (c_int, c_int)  # card, chip
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "dcmi_init": (),
    "dcmi_get_card_list": (_INT, _INT, c_int),
    "dcmi_get_card_num_list": (_INT, _INT, c_int),  # the older name
    "dcmi_get_device_num_in_card": (c_int, _INT),
    "dcmi_get_device_id_in_card": (c_int, _INT, _INT, _INT),
    "dcmi_get_device_logic_id": (_INT, *_CHIP),
    "dcmi_get_device_chip_info": (*_CHIP, POINTER(ChipInfo)),
    "dcmi_get_device_pcie_info_v2": (*_CHIP, POINTER(PcieInfo)),
    "dcmi_get_device_temperature": (*_CHIP, _INT),
    "dcmi_get_device_memory_info_v3": (*_CHIP, POINTER(MemoryInfo)),
    "dcmi_get_device_hbm_info": (*_CHIP, POINTER(HbmInfo)),
    "dcmi_get_device_utilization_rate": (*_CHIP, c_int, _UINT),
    "dcmi_get_device_health": (*_CHIP, _UINT),
    "dcmi_get_device_errorcode_v2": (*_CHIP, _INT, _UINT, c_uint),
    "dcmi_get_device_ecc_info": (*_CHIP, c_int, POINTER(EccInfo)),
    "dcmi_get_device_sensor_info": (*_CHIP, c_int, POINTER(SensorInfo)),
    "dcmi_get_device_resource_info": (*_CHIP, POINTER(ProcessInfo), _INT),
    "dcmi_mcu_get_power_info": (c_int, _INT),
}


class DcmiLibrary:
    """Calls by name. OSError when the library can't be loaded."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = ctypes.CDLL(path)
        self._clock = clock
        self._functions: dict[str, Any] = {}
        self._rests_until_s: dict[tuple[object, ...], float] = {}

    def call(self, symbol: str, *arguments: Any) -> int | None:
        """The call's code, 0 for success. None when the library lacks the symbol, or when the
        device refused the same call as unsupported less than RETRY_S ago.
        """
        # Numbers name the device and what is asked; the rest is where the answer goes.
        what = (symbol, *(value for value in arguments if isinstance(value, int)))
        if self._rests_until_s.get(what, 0.0) > self._clock():
            return None
        function = self._function(symbol)
        if function is None:
            return None
        code = int(function(*arguments))
        if code == UNSUPPORTED:
            self._rests_until_s[what] = self._clock() + RETRY_S
        return code

    def _function(self, symbol: str) -> Any:
        """None for a symbol that this version of the library does not have."""
        if symbol not in self._functions:
            function = getattr(self._library, symbol, None)
            if function is not None:
                function.argtypes, function.restype = SIGNATURES[symbol], c_int
            self._functions[symbol] = function
        return self._functions[symbol]
