"""String formats as regular expressions. They are narrower than their standards here and there; everything they match
is valid.

llguidance has formats of its own, but some of them match leap seconds that never were and e-mail addresses that are
too long.
"""

from __future__ import annotations

_DATE = (
    r"((\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_GROUP = r"[0-9a-f]{1,4}"
_PATH = r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*)*"
_QUERY = r"([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})*"
_POINTER = r"(/([^/~]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,4}Y(\d{1,2}M(\d{1,3}D)?)?|\d{1,2}M(\d{1,3}D)?|\d{1,3}D|\d{1,4}W"
    r"|T(\d{1,4}H(\d{1,2}M(\d{1,2}S)?)?|\d{1,4}M(\d{1,2}S)?|\d{1,6}S))",
    "email": rf"[A-Za-z0-9_+-]{{1,24}}(\.[A-Za-z0-9_+-]{{1,12}}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,3}}\.[a-z]{{2,12}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": rf"({_GROUP}:){{7}}{_GROUP}|::({_GROUP}(:{_GROUP}){{0,5}})?|{_GROUP}::({_GROUP}(:{_GROUP}){{0,4}})?"
    rf"|({_GROUP}:){{2}}:({_GROUP}(:{_GROUP}){{0,3}})?|({_GROUP}:){{3}}:({_GROUP}(:{_GROUP}){{0,2}})?"
    rf"|({_GROUP}:){{4}}:({_GROUP}(:{_GROUP})?)?",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"[a-z][a-z0-9+.-]{{1,12}}://{_HOST}(:[1-9]\d{{0,3}})?{_PATH}(\?{_QUERY})?(#{_QUERY})?",
    "uri-reference": rf"([a-z][a-z0-9+.-]{{1,12}}://{_HOST})?{_PATH}(\?{_QUERY})?(#{_QUERY})?",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d{{0,3}})(#|{_POINTER})",
}
