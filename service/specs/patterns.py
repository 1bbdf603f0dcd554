"""What texts of requests must look like: a pattern, which is in the API's schema, and the same in words, for people."""

_BREAKING = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff"
PRINTABLE = rf"^[^{_BREAKING}]*$"
"""No control characters, none that break lines or turn the direction of what follows, and none that no XML takes."""
NAME = rf"^[^{_BREAKING}]*[^\s\u200b-\u200f\u2060\ufeff{_BREAKING}][^{_BREAKING}]*$"
"""The same, and in it something that is seen: neither a space nor without width."""
LONGEST_NAME = 100
"""Characters of a project's name, and of a key's owner."""
NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text cannot hold it."""
TAG = r"^[A-Za-z0-9][A-Za-z0-9._:/+-]{0,63}$"

FIELD = r"^[A-Za-z0-9_.]+$"
FIELDS = r"^ *[A-Za-z0-9_.]+( *, *[A-Za-z0-9_.]+)* *$"
TWO_FIELDS = r"^[A-Za-z0-9_.]+,[A-Za-z0-9_.]+$"
ORDER = r"^-?[A-Za-z0-9_.]+$"
METRICS = r"^[a-z0-9_]+(,[a-z0-9_]+)*$"
NUMBERS = r"^[0-9]{1,18}(,[0-9]{1,18})*$"
KEY_ID = r"^[0-9a-f]{16}$"
FINGERPRINT = r"^[0-9a-f]{64}$"
FINGERPRINTS = r"^[0-9a-f]{64}(,[0-9a-f]{64})*$"
NUMBER_OR_FINGERPRINT = r"^([0-9]{1,18}|[0-9a-f]{64})$"

_FINGERPRINT = "64 digits and letters a to f"
WORDS = {
    PRINTABLE: "must be without control characters, and without such as break lines or turn the direction of a text",
    NAME: "must have a character that is seen, and none that control, break lines or turn the direction of a text",
    NO_NUL: "must be without null characters",
    TAG: "must be a letter or digit, then up to 63 letters, digits and ._:/+-, without spaces",
    FIELD: "must be the name of one field, such as rank or training.lr",
    FIELDS: "must be names of fields, separated by commas, such as rank,training.lr",
    TWO_FIELDS: "must be the names of two fields with a comma between them, such as rank,lambda_ort",
    ORDER: "must be one name, such as training.lr, or with - before it for the largest first",
    METRICS: "must be names of metrics, separated by commas without spaces, such as accuracy,ece",
    NUMBERS: "must be numbers, separated by commas without spaces, such as 7,8",
    KEY_ID: "must be the id of a key, 16 digits and letters a to f",
    FINGERPRINT: f"must be a fingerprint, {_FINGERPRINT}",
    FINGERPRINTS: f"must be fingerprints, each {_FINGERPRINT}, separated by commas without spaces",
    NUMBER_OR_FINGERPRINT: f"must be a number, or a fingerprint, {_FINGERPRINT}",
}
