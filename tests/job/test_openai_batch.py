"""An OpenAI batch file in, result and error files out."""

from __future__ import annotations

import json

import pytest
from stub_backend import StubBackend

from deepinfer_ray.errors import ConfigError, InputError

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(custom_id, url=CHAT, **body):
    if url == CHAT:
        body.setdefault("messages", HI)
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


@pytest.fixture
def batch(job, tmp_path, spell):
    """batch(requests or texts, flags…) → (results, errors) by custom_id; `.items`: what the backend got."""

    def run(*requests, answer="a</think>b", end="\n", stub=None, **options):
        texts = [each if isinstance(each, str) else json.dumps(each) for each in requests]
        (tmp_path / "in.jsonl").write_text("".join(text + end for text in texts), newline="")
        items = []
        answered = StubBackend(
            answer=lambda item: items.append(item) or ([*spell(answer), 1], answer, "stop")
        )
        run.outcome = job(input=tmp_path / "in.jsonl", stub=stub or answered, **options)
        run.items = sorted(items, key=lambda item: item.key)
        return read(options.get("output"))

    def read(output=None):
        root = tmp_path / "out" if output is None else output
        files = [(root / name).read_text().splitlines() for name in ("results.jsonl", "errors.jsonl")]
        return tuple({line["custom_id"]: line for line in map(json.loads, lines)} for lines in files)

    run.read = read
    return run


def test_a_chat_response(batch, job):
    results, errors = batch(request("r1", reasoning_effort="high"), request("r2", thinking=False))
    assert errors == {}
    line = results["r1"]
    assert (line["error"], line["response"]["status_code"]) == (None, 200)
    assert line["id"].startswith("batch_req_")
    body = line["response"]["body"]
    (choice,) = body["choices"]
    message = {"role": "assistant", "content": "b", "refusal": None, "reasoning_content": "a"}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    prompt = len(batch.items[0].prompt)
    usage = {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert results["r2"]["response"]["body"]["choices"][0]["message"]["content"] == "ab"
    assert "results.jsonl has 2 lines, errors.jsonl 0" in job.said
    assert any("OpenAI batch: results.jsonl and errors.jsonl" in line for line in job.said)


def test_a_completions_response(batch, spell):
    results, _ = batch(request("r", TEXT, prompt="once"), request("ids", TEXT, prompt=[5, 6]), answer="upon")
    (choice,) = results["r"]["response"]["body"]["choices"]
    assert choice == {"index": 0, "text": "upon", "logprobs": None, "finish_reason": "stop"}
    assert results["r"]["response"]["body"]["object"] == "text_completion"
    assert [item.prompt.tolist() for item in batch.items] == [[0, *spell("once")], [5, 6]]
    assert batch.items[0].params.max_tokens == 256


def test_tool_calls(batch, tmp_path):
    call = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = request("r", tools=tools, thinking=False, messages=[{"role": "user", "content": ""}])
    model = long_model(tmp_path)
    results, _ = batch(asked, answer=call, model=model)
    (choice,) = results["r"]["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def long_model(tmp_path):
    from conftest import TINY, byte_tokenizer

    root = tmp_path / "model"
    root.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1 << 20
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    return str(root)


def test_parameters_of_a_body(batch):
    names = {"temperature": 0.25, "top_p": 0.5, "stop": "x", "seed": 7, "presence_penalty": 1.0, "top_k": 3}
    harmless = {"user": "u", "metadata": {"a": "b"}, "stream": False, "service_tier": "auto", "store": None}
    batch(
        request("a", **names, **harmless, max_completion_tokens=9, logit_bias={"5": -1}),
        request("b", logprobs=True, top_logprobs=2, max_tokens=3, chat_template_kwargs={"thinking": False}),
        request("c", TEXT, prompt="x", logprobs=4, max_tokens=2, best_of=1, echo=False),
        request("d"),
    )
    first, second, third, fourth = (item.params for item in batch.items)
    assert (first.temperature, first.top_p, first.top_k, first.stop) == (0.25, 0.5, 3, ("x",))
    assert (first.seed, first.presence_penalty, first.max_tokens) == (7, 1.0, 9)
    assert first.logit_bias == {5: -1.0}
    assert (second.logprobs, second.max_tokens) == (2, 3)
    assert len(batch.items[1].prompt) < len(batch.items[0].prompt)  # no effort line
    assert (third.logprobs, third.max_tokens) == (4, 2)
    assert fourth.max_tokens == 256 - len(batch.items[3].prompt)  # what the context leaves


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "not": {}}}}
BAD = [
    ("{", "wrong_type", "line 1 is no JSON"),
    ("[]", "wrong_type", "line 1 holds list, a row is a JSON object"),
    (request(5), "wrong_type", "column custom_id holds int in line 1, expected a string"),
    (request("r", "/v1/embeddings"), "wrong_type", "the url is '/v1/embeddings', it must be"),
    ({"custom_id": "r", "body": {"messages": HI}}, "wrong_type", "the url is missing"),
    ({**request("r"), "method": "GET"}, "wrong_type", "the method is 'GET'"),
    ({**request("r"), "body": [1]}, "wrong_type", "column body is JSON of type list, expected"),
    (request("r", max_token=5), "bad_sampling_params", "body.max_token is unknown; did you mean"),
    (request("r", functions=[]), "bad_sampling_params", "body.functions is unknown"),
    (request("r", stream=True), "bad_sampling_params", "body.stream is not supported here"),
    (request("r", temperature=-1), "bad_sampling_params", "temperature"),
    (request("r", n=2), "bad_sampling_params", "n is set for the whole job (--n 1)"),
    (request("r", max_tokens=1, max_completion_tokens=2), "bad_sampling_params", "differ; give one of them"),
    (request("r", logprobs=2), "bad_sampling_params", "logprobs of a chat is true or false"),
    (request("r", top_logprobs=2), "bad_sampling_params", "top_logprobs needs logprobs true"),
    (request("r", messages=[]), "bad_messages", "the list is empty"),
    (request("r", messages=None), "null_prompt", "the body has no messages"),
    (request("r", chat_template_kwargs={"thinkin": 1}), "bad_messages", "unknown chat option 'thinkin'"),
    (request("r", response_format=FORMAT), "bad_schema", "the keyword 'not' is not supported"),
    (request("r", structured_outputs={"json": {"not": {}}}), "bad_schema", "the keyword 'not'"),
    (request("r", TEXT), "null_prompt", "the body has no prompt"),
    (request("r", TEXT, prompt=""), "empty_prompt", "empty string"),
    (request("r", TEXT, prompt=["a", "b"]), "wrong_type", "has 2 prompts; give each a line of its own"),
    (request("r", TEXT, prompt=[1, "x"]), "wrong_type", "the token id at position 1"),
    (request("r", TEXT, prompt=[9999]), "bad_token_id", "token id 9999"),
    (request("r", TEXT, prompt="a", tools=[]), "bad_sampling_params", "body.tools is unknown"),
    (request("r", TEXT, prompt="a", echo=True), "bad_sampling_params", "body.echo is not supported here"),
    (request("r", TEXT, prompt={"a": 1}), "wrong_type", "neither a string nor a list"),
]  # fmt: skip


def test_bad_requests_go_to_the_error_file(batch, tmp_path):
    texts = []
    for number, (asked, *_) in enumerate(BAD):
        if isinstance(asked, dict):
            asked = {
                **asked,
                "custom_id": f"bad{number}" if asked["custom_id"] == "r" else asked["custom_id"],
            }
        texts += [asked, request(f"good{number}", thinking=False)]
    results, _ = batch(*texts)
    assert list(results) == [f"good{number}" for number in range(len(BAD))]
    assert batch.outcome.exit_code == 0
    assert batch.outcome.summary.counts.errors == len(BAD)
    lines = [json.loads(line) for line in (tmp_path / "out/errors.jsonl").read_text().splitlines()]
    for number, (line, (_, code, message)) in enumerate(zip(lines, BAD, strict=True)):
        assert (line["response"], line["error"]["code"]) == (None, code), line
        assert message.replace("line 1", f"line {number * 2 + 1}") in line["error"]["message"]
    assert [line["custom_id"] for line in lines[:4]] == [None, None, "5", "bad3"]


@pytest.mark.parametrize("end", ["\r\n", "\n\n", "\n"])
def test_line_ends(batch, end):
    results, errors = batch(request("a"), request("b"), end=end)
    assert (set(results), errors) == ({"a", "b"}, {})


def test_duplicate_and_missing_custom_id(batch, job):
    with pytest.raises(
        InputError,
        match=r"the id 'a' of column custom_id occurs twice: in in.jsonl, line 1 and in in.jsonl, line 3",
    ):
        batch(request("a"), request("b"), request("a"))
    missing = request("c")
    del missing["custom_id"]
    with pytest.raises(InputError, match=r"the id column custom_id is null in in.jsonl, line 2"):
        batch(request("a"), missing)
    assert job.stub.closed == []


def test_no_file_before_the_job_is_complete(batch, job, tmp_path):
    many = [request(f"r{i}", TEXT, prompt=f"p{i}") for i in range(200)] + [request("bad", TEXT)]
    sets = ["job.rows_per_part=16"]
    with pytest.raises(FileNotFoundError):
        batch(*many, stub=StubBackend(die_after=100), sets=sets)
    assert batch.outcome is None or batch.outcome.exit_code == 4
    assert not list((tmp_path / "out").glob("*.jsonl"))
    job(input=tmp_path / "in.jsonl", sets=sets)
    resumed = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.jsonl")}
    assert [json.loads(line)["custom_id"] for line in resumed["results.jsonl"].splitlines()] == [
        f"r{i}" for i in range(200)
    ]
    assert json.loads(resumed["errors.jsonl"])["custom_id"] == "bad"
    (tmp_path / "out/results.jsonl").unlink()
    job(input=tmp_path / "in.jsonl", sets=sets)  # nothing left to run: the files alone are made again
    assert job.stub.closed == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.jsonl")} == resumed


def test_retried_errors_move_to_the_results(batch, job, tmp_path):
    _, errors = batch(request("r", TEXT, prompt="sixsix"), stub=StubBackend(fail="out_of_blocks"))
    assert errors["r"]["error"] == {"code": "out_of_blocks", "message": "this row does not fit"}
    job(input=tmp_path / "in.jsonl", retry_errors=True)
    results, errors = batch.read()
    assert (set(results), errors) == ({"r"}, {})


def test_logprobs_and_n(batch, job, tmp_path):
    def answer(stub, item):
        result = StubBackend.result(stub, item)
        result.token_ids = result.token_ids[:2]
        result.logprobs = result.logprobs[:2]
        result.top_logprobs = [[(100, -0.5)], [(300, -0.5)]]
        return result

    class Stub(StubBackend):
        result = answer

    asked = [request("c", logprobs=True, top_logprobs=1), request("t", TEXT, prompt="ab", logprobs=1)]
    results, _ = batch(*asked, stub=Stub(), n=2)
    chat, text = (results[name]["response"]["body"] for name in "ct")
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    first, *_ = text["choices"][0]["logprobs"]["tokens"]
    assert first == "b"
    assert text["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert text["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}
    entry = chat["choices"][1]["logprobs"]["content"][1]
    assert entry["top_logprobs"][0] == {
        "token": "<｜User｜>",
        "logprob": -0.5,
        "bytes": list("<｜User｜>".encode()),
    }
    assert chat["usage"]["completion_tokens"] == 4


def test_an_output_prefix_stays_out_of_the_files(batch):
    results, errors = batch(request("a"), request("b", TEXT), output_prefix="out_")
    assert (set(results), set(errors)) == ({"a"}, {"b"})


def test_flags_that_name_columns(batch, tmp_path):
    with pytest.raises(ConfigError, match=r"--sampling-column s: the input is an OpenAI batch"):
        batch(request("a"), sampling_column="s")
    with pytest.raises(FileNotFoundError):  # rows of a column that is named: no batch, no files
        batch(request("a"), token_ids_column="body")


def test_a_jsonl_without_bodies_is_no_batch(batch, tmp_path):
    with pytest.raises(FileNotFoundError):
        batch({"custom_id": "a", "prompt": "x"})
    assert len(list((tmp_path / "out").glob("part-*"))) == 1
