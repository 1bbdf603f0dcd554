"""The kinds of problems that an answer can be (RFC 9457, section 3.1.1), what each means, and what to do."""

from dataclasses import dataclass

from service.errors import (
    ConflictError,
    GoneError,
    IdempotencyError,
    KeyRefusedError,
    NotFoundError,
    PreconditionError,
    QuotaError,
    ScopeError,
    SecretMissingError,
    StateError,
    StorageAwayError,
)

PAGE = "/problems"
"""The page that lists them."""


@dataclass(frozen=True)
class ProblemType:
    """One kind of problem: its name, the status it is answered with, what it means and what to do.

    `error` is the exception that stands for it, where one of ours does.
    """

    name: str
    status: int
    meaning: str
    fix: str
    error: type[Exception] | None = None

    @property
    def uri(self) -> str:
        """Where it is described: a path of this service."""
        return f"{PAGE}#{self.name}"


UNKNOWN_HOST, DATABASE_FULL, READ_ONLY = "unknown-host", "database-full", "read-only"
DATABASE_UNSURE = "database-unsure"

# The first of a status stands for it where nothing more precise is known.
PROBLEM_TYPES = (
    ProblemType(
        "unreadable-body",
        400,
        "The body is no JSON or YAML that can be read, or is nested too deep.",
        "Send one document of valid JSON or YAML; the detail says where reading ended.",
    ),
    ProblemType(
        UNKNOWN_HOST,
        400,
        "The header Host is no name of this service.",
        "Use one of its names, or let whoever runs it add this one to TTSV_ALLOWED_HOSTS.",
    ),
    ProblemType(
        "key-refused",
        401,
        "No key was sent, or it is unknown, revoked or expired.",
        "Send `Authorization: Bearer ttsv_...`; an admin makes a key by `ttsv keys create`.",
        KeyRefusedError,
    ),
    ProblemType(
        "not-allowed",
        403,
        "The key does not have the scope that this takes, or a page of another site sent the request.",
        "Use a key with the scope that the detail names.",
        ScopeError,
    ),
    ProblemType(
        "not-found",
        404,
        "There is no such path, experiment, trial, file, data set or preset, or it is another project's.",
        "Look for it in the list that it would be in; /docs has every path.",
        NotFoundError,
    ),
    ProblemType(
        "wrong-method",
        405,
        "The path does not take this method.",
        "Use one of those that the header Allow names.",
    ),
    ProblemType(
        "no-such-form",
        406,
        "The answer has none of the forms that Accept asks for.",
        "Ask for one that the detail names, by Accept or the parameter `format`.",
    ),
    ProblemType(
        "wrong-state",
        409,
        "The experiment's state does not allow this action.",
        "Bring it into a state that does, which the detail names, or leave it.",
        StateError,
    ),
    ProblemType("name-taken", 409, "Something else has this name.", "Choose another.", ConflictError),
    ProblemType(
        "secret-missing",
        409,
        "The secret under which the keys there are were hashed is not in the service's data folder: no other is made.",
        "Whoever runs it must put key-secret back from a backup; if it is lost, revoke the keys there are first.",
        SecretMissingError,
    ),
    ProblemType(
        "gone",
        410,
        "What is asked for was there, and is not any more or is not what it was.",
        "Do not ask again; a trial can be run once more to make its files anew.",
        GoneError,
    ),
    ProblemType(
        "changed-meanwhile",
        412,
        "Somebody changed the experiment since the answer whose ETag If-Match names.",
        "Read it again, and send the change with its new ETag if it is still wanted.",
        PreconditionError,
    ),
    ProblemType(
        "body-too-large",
        413,
        "The body is larger than this service takes.",
        "Send less at once, or let whoever runs it raise TTSV_MAX_BODY_BYTES.",
    ),
    ProblemType(
        "wrong-media-type",
        415,
        "The body is of a type that is not read.",
        "Send it with Content-Type: application/json or application/yaml.",
    ),
    ProblemType(
        "no-such-range",
        416,
        "The file has none of the bytes that Range asks for.",
        "Ask within the length that Content-Range names.",
    ),
    ProblemType(
        "invalid-request",
        422,
        "Fields of the body, parameters or headers have values that are not allowed.",
        "Change every field that `errors` names to what its message says.",
    ),
    ProblemType(
        "idempotency-key-used",
        422,
        "The Idempotency-Key was used before with another body.",
        "Use a new key for a new request, or send the former body again.",
        IdempotencyError,
    ),
    ProblemType(
        "quota-used-up",
        429,
        "The project may not have more trials waiting, or has used its GPU-hours.",
        "Wait as long as Retry-After says, or ask an admin for a larger quota.",
        QuotaError,
    ),
    ProblemType(
        "service-error",
        500,
        "The service made a mistake; whether something was stored is not known.",
        "Tell whoever runs it the request's id: its log has the details. Look what is there before sending it again.",
    ),
    ProblemType(
        "database-away",
        503,
        "The database does not answer; nothing was stored.",
        "Send the request again after as many seconds as Retry-After says.",
    ),
    ProblemType(
        DATABASE_UNSURE,
        503,
        "The connection to the database broke as it stored something; whether it is stored is not known.",
        "Look what is there before sending it again. With the Idempotency-Key that it had send it again at once.",
    ),
    ProblemType(
        DATABASE_FULL,
        503,
        "The database has no room left on its disk; nothing was stored.",
        "Whoever runs it must make room; then send the request again.",
    ),
    ProblemType(
        READ_ONLY,
        503,
        "The database cannot be written; nothing was stored.",
        "Whoever runs it must make its file, its folder and the disk writable; then send the request again.",
    ),
    ProblemType(
        "storage-away",
        503,
        "The store of trials' files (TTSV_STORAGE) does not answer.",
        "Send the request again later; if that does not help, whoever runs it must look at the store.",
        StorageAwayError,
    ),
)
