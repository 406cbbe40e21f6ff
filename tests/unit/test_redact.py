"""Secrets leave no text that goes into a support bundle, and what a bug report is about stays."""

from __future__ import annotations

import base64
import json
import urllib.parse

import pytest
from pdstack.redact import Redactor

S = "q7Zr9-TkV2m_X4pW"  # stands for a secret wherever a form below has one
PEM = f"-----BEGIN PRIVATE KEY-----\n{S}\n{S}\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"API_KEY={S}",
        f"export HF_TOKEN={S}",
        f'HF_TOKEN="{S}"',
        f"PASSWORD=with spaces {S} to the end",
        f'Environment="HF_TOKEN=with spaces {S}" "A=b"',
        f"Environment=HF_TOKEN={S} A=b",
        f"ExecStart=/x --api-key {S} --port 1",
        f"ExecStart=/x --api-key={S} --port 1",
        f"/x --admin-api-key '{S}'",
        f'ExecStart="/x" "--api-key" "{S}" "--port" "1"',
        f"SetCredential=api_key:{S}",
        f"SetCredentialEncrypted=api_key: {S}",
        f"Authorization: Bearer {S}",
        f"curl -H 'Authorization: Basic {S}' -u user:{S} x",
        f"x-api-key: {S}",
        f"Cookie: a={S}; b={S}",
        f"https://user:{S}@host/path",
        f"http://{S}@proxy:3128",
        f"GET /models?token={S}&x=1 HTTP/1.1",
        f"https://bucket/x?X-Amz-Signature={S}",
        f'{{"api_key": "{S}", "port": 1}}',
        f'{{"api_keys": ["{S}", "{S}"], "port": 1}}',
        json.dumps({"message": json.dumps({"api_key": S})}),
        f"server_args=ServerArgs(model_path='/x', api_key='{S}', port=1)",
        f"api_keys:\n  - {S}\n  - {S}\nport: 1",
        f"token: |\n  {S}\n  {S}\nport: 1",
        f"  password: a b {S}",
        f"pd_router_token: '{S}'",
        f"login with password={S} failed, token {S}"[: -len(S) - 7],
        "hf_" + S.replace("-", "x"),
        f"token hf_{S.replace('-', 'x')} in a sentence",
        "sk-" + S,
        "ghp_" + S.replace("-", "x"),
        f"eyJ{S}.{S}.{S}",
        f"root:$6${S}:19000:",
        PEM,
        PEM.split("-----END")[0],
    ],
)
def test_a_secret_in_this_form_goes(text: str) -> None:
    redactor = Redactor()
    clean = redactor.text(text)
    assert S not in clean
    assert S.replace("-", "x") not in clean
    assert "<removed:" in clean
    assert sum(redactor.counts.values()) > 0
    assert redactor.text(clean) == clean, "a second pass has nothing left to do"


@pytest.mark.parametrize(
    "text",
    [
        "max-total-tokens: 8192",
        '{"max_total_num_tokens": 8192, "prompt_tokens": 12, "total_tokens": 28}',
        "Decode batch, #running-req: 1, #token: 27, token usage: 0.00, gen throughput (token/s): 12.5",
        'sglang:num_used_tokens{model_name="tiny"} 27.0',
        "tokenizer_path='/var/lib/pdstack/models/x', skip_tokenizer_init=False",
        '"eos_token": "<|eot|>", "bos_token": "<s>", "eos_token_id": 2',
        "LoadCredential=api_key:/etc/pdstack/credentials/api_key",
        "token_file: /etc/pdstack/credentials/hf_token",
        "torch==2.9.1 --hash=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "revision: eeeac82a68f9a8e4a99ef2622069d83ca62f4ae4",
        "http://10.0.0.1:30000/v1/models?limit=3",
        "api_key: None, admin_api_key=null",
        "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.",
        "pd-router.service: Main process exited, code=exited, status=1/FAILURE",
        "INVOCATION_ID=46f54d76ba954b16b67bc1970900e8fa",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    redactor = Redactor([S])
    assert redactor.text(text) == text
    assert redactor.counts == {}


@pytest.mark.parametrize(
    "form",
    [
        lambda value: value,
        lambda value: urllib.parse.quote(value, safe=""),
        lambda value: json.dumps(value)[1:-1],
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: base64.b64encode(f"{value}\n".encode()).decode(),
    ],
)
@pytest.mark.parametrize("value", ["hunter2/plus+", 'quo"te\\d', "pl\u00e4in-w\u00f6rd"])
def test_a_known_value_goes_wherever_it_stands(value: str, form) -> None:
    text = f"a word {form(value)}, and more"
    assert (
        Redactor([value]).text(text)
        == "a word <removed:known-value>" + text[text.index(form(value)) + len(form(value).rstrip("=")) :]
    )


def test_a_short_value_is_not_hunted_for() -> None:
    assert Redactor(["a", ""]).text("a banana") == "a banana"


def test_the_longer_of_two_known_values_goes_first() -> None:
    assert "suffix" not in Redactor(["secret", "secretsuffix"]).text("x secretsuffix y")
