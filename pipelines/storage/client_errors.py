"""What the clients of stores raise: access, missing, away or damage, by their codes and classes.

Clients are optional packages: their classes are looked up among the modules that are loaded, since
an error of theirs cannot be there without its module.
"""

from __future__ import annotations

import sys
from typing import Literal

Kind = Literal["access", "missing", "full", "away", "damage", "other"]

# Classes of optional packages, by module. The first that fits decides.
_CLIENTS: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    (
        "access",
        "botocore.exceptions",
        (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "UnknownCredentialError",
            "ProfileNotFound",
            "ConfigNotFound",
            "ConfigParseError",
            "NoRegionError",
            "InvalidRegionError",
            "NoAuthTokenError",
            "TokenRetrievalError",
            "SSOError",
            "LoginError",
            "ParamValidationError",
            "ValidationError",
            "InvalidConfigError",
            "InvalidEndpointConfigurationError",
            "InvalidIMDSEndpointError",
            "UnknownEndpointError",
            "EndpointProviderError",
        ),
    ),
    ("away", "botocore.exceptions", ("BotoCoreError",)),  # connections, time-outs, broken streams
    ("access", "google.auth.exceptions", ("DefaultCredentialsError", "RefreshError")),
    ("away", "google.auth.exceptions", ("GoogleAuthError",)),
    ("access", "azure.core.exceptions", ("ClientAuthenticationError",)),
    ("missing", "azure.core.exceptions", ("ResourceNotFoundError",)),
    ("away", "azure.core.exceptions", ("AzureError",)),
    ("away", "aiohttp", ("ClientError",)),
    ("away", "requests.exceptions", ("RequestException",)),
    ("away", "urllib3.exceptions", ("HTTPError",)),
    ("away", "fsspec.exceptions", ("FSTimeoutError",)),
    ("away", "fsspec.exceptions", ("BlocksizeMismatchError",)),  # it changed while it was read
    ("damage", "zstandard", ("ZstdError",)),
    ("damage", "compression.zstd", ("ZstdError",)),
)
# What a store's answer means, by the code that its client keeps beside the words.
_CODES: dict[str, Kind] = {
    **dict.fromkeys(
        ("AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken")
        + ("ExpiredTokenException", "TokenRefreshRequired", "InvalidClientTokenId", "AuthFailure")
        + ("RequestTimeTooSkewed", "RequestExpired", "UnrecognizedClientException")
        + ("SignatureDoesNotMatch", "InvalidBucketName", "PermanentRedirect", "401", "403"),
        "access",
    ),
    **dict.fromkeys(("NoSuchBucket", "NoSuchKey", "NoSuchUpload", "NotFound", "404"), "missing"),
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "InternalError")
        + ("ServiceUnavailable", "RequestTimeout", "OperationAborted", "408", "409", "429"),
        "away",
    ),
}


def of_client(error: BaseException) -> Kind | None:
    """The kind of an error that a store's client raises, by its code or its class."""
    response = getattr(error, "response", None)
    found = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    for code in (found, getattr(error, "status_code", None), getattr(error, "code", None)):
        if not isinstance(code, str | int) or isinstance(error, OSError | SystemExit):
            continue
        if (kind := _CODES.get(str(code))) is not None:
            return kind
        if str(code).isdigit() and 400 <= int(code) < 600:
            return "away" if int(code) >= 500 else "other"
    if found is not None and isinstance(response, dict):
        return _of_answer(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for kind, module, names in _CLIENTS:
        loaded = sys.modules.get(module)
        classes = tuple(c for name in names if isinstance(c := getattr(loaded, name, None), type))
        if isinstance(error, classes):
            return kind
    return None


def _of_answer(status: object) -> Kind:
    """The kind of a store's answer whose code nobody knows, by its HTTP status."""
    if status in (401, 403):
        return "access"
    if status in (408, 429) or (isinstance(status, int) and status >= 500):
        return "away"
    return "other"
