"""The configuration: what is wrong is named, what is printed can be read back."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from autoscale.signals import Role
from infra.reference import DEFAULT_MODEL, weights
from infra.s3_server import S3Server
from prefill_workers.model_card import FILE
from prefill_workers.settings import COMPOSE_UP_TO, Weighing
from serving.app import build_app
from serving.config import ConfigError, OrbitServeConfig, documented
from serving.scaling.roles import fixed_bundles, pinned, planned
from serving.settings import VisionSettings


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "orbitserve.yaml"
    path.write_text(text)
    return path


def test_a_file_and_the_command_line_are_put_together(tmp_path: Path, checkpoint: Path):
    path = written(tmp_path, "model: {path: /nowhere}\nhttp: {port: 1234}\nprefill: {replicas: 3}\n")
    config = OrbitServeConfig.load(
        path, {"model.path": checkpoint, "http.host": "0.0.0.0", "http.port": None, "model.max_model_len": 2048}
    )
    assert config.model.max_model_len == 2048
    assert (config.model.path, config.model.served_name) == (checkpoint, "model")
    assert (config.http.host, config.http.port, config.prefill.replicas) == ("0.0.0.0", 1234, 3)


def test_a_model_is_served_under_the_name_that_it_was_asked_for_by(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("infra.models.hub.snapshot", lambda name: checkpoint)
    config = OrbitServeConfig.load(None, {"model.path": "acme/tiny"})
    assert (config.model.path, config.model.served_name) == (checkpoint, "acme/tiny")
    path = written(tmp_path, "model: {path: acme/tiny, served_name: ours}\n")
    assert OrbitServeConfig.load(path).model.served_name == "ours"
    assert OrbitServeConfig.load(path, {"model.served_name": "theirs"}).model.served_name == "theirs"


def test_nothing_is_downloaded_for_a_configuration_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("infra.models.hub.snapshot", lambda name: pytest.fail("downloaded"))
    with pytest.raises(ConfigError, match=r"http\.port"):
        OrbitServeConfig.load(None, {"model.path": "acme/tiny", "http.port": 0})


@pytest.mark.parametrize("path", [".", "../model", "../model/"])
def test_a_model_is_named_after_its_directory_however_that_is_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.chdir(checkpoint)
    assert OrbitServeConfig.load(None, {"model.path": path}).model.served_name == "model"


def test_a_path_that_is_none_is_named_in_the_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        OrbitServeConfig.load(written(tmp_path, "model: {path: 2024}\n"))


def test_paths_are_those_of_the_working_directory_wherever_they_are_used(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "template.jinja").write_text("{{ messages }}")
    text = f"model: {{path: {checkpoint.name}, chat_template: template.jinja}}\naccess_log: {{directory: logs}}\n"
    config = OrbitServeConfig.load(written(tmp_path, text + "library: {directory: kept, url: behind}\n"))
    here = Path.cwd()
    assert config.model.path == here / checkpoint.name
    assert (config.model.chat_template, config.access_log.directory) == (str(here / "template.jinja"), here / "logs")
    assert (config.library.directory, config.library.url) == (here / "kept", str(here / "behind"))
    assert config.files_url == str(here / ".orbitserve" / "files"), "defaults too"
    other = "library: {directory: null, url: 's3://bucket/x'}\nfiles_url: 'memory://files'\n"
    config = OrbitServeConfig.load(written(tmp_path, f"model: {{path: {checkpoint.name}}}\n{other}"))
    assert (config.library.directory, config.library.url) == (None, "s3://bucket/x")
    assert (config.files_url, config.model.chat_template) == ("memory://files", None)
    words = "{{ messages }}" * 1000
    assert (
        OrbitServeConfig.load(
            written(tmp_path, f"model: {{path: {checkpoint.name}, chat_template: '{words}'}}\n")
        ).model.chat_template
        == words
    )


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    text = "model: {path: ~/model, chat_template: ~/template.jinja}\naccess_log: {directory: ~/logs}\n"
    path = written(tmp_path, f"{text}library: {{directory: ~/kept, url: ~/behind}}\nfiles_url: ~/files\n")
    config = OrbitServeConfig.load(path)
    assert (config.model.path, config.model.served_name) == (checkpoint, "model")
    assert config.model.chat_template == str(tmp_path / "template.jinja")
    assert (config.access_log.directory, config.library.directory) == (tmp_path / "logs", tmp_path / "kept")
    assert (config.library.url, config.files_url) == (str(tmp_path / "behind"), str(tmp_path / "files"))
    text = "model: {path: ~/model, chat_template: '~{{ messages }}'}\nlibrary: {url: 's3://bucket/~'}\n"
    config = OrbitServeConfig.load(written(tmp_path, text))
    assert (config.model.chat_template, config.library.url) == ("~{{ messages }}", "s3://bucket/~")
    with pytest.raises(ConfigError, match=r"model\.path: ~nobody-at-all/x is no directory"):
        OrbitServeConfig.load(None, {"model.path": "~nobody-at-all/x"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {path: MODEL}\nprefil: {}\n", "prefil: Extra inputs"),
        ("model: {path: MODEL}\ndecode: {replicas: 0}\n", "decode.replicas"),
        ("model: {path: MODEL}\nvision: {replicas: -1}\n", "vision.replicas"),
        ("model: {path: MODEL}\npatch: {replicas: {max: 2}}\n", "patch.replicas: .* give a number"),
        ("model: {path: MODEL}\nprefill: {max_ongoing_requests: 256}\n", r"prefill: .*must be more than max_queue"),
        ("model: {path: MODEL}\nhttp: {port: often}\n", "http.port"),
        ("model: {path: MODEL}\nhttp: {max_image_pixels: 200000000}\n", "http.max_image_pixels"),
        (
            "model: {path: MODEL}\nhttp: {max_concurrent_requests: 2000}\n",
            r"ingress.max_ongoing_requests \(1024\) must be more than http.max_concurrent_requests \(2000\)",
        ),
        ("model: {path: MODEL, dtype: int4}\n", "model.dtype"),
        (
            "model: {path: some-hub/model}\n",
            "model.path: some-hub/model is no directory, not in the cache .*HF_HUB_OFFLINE",
        ),
        ("model: {path: MODEL}\nhttp: {api_keys: {key: dynamic-library}}\n", "names the dynamic library"),
        (
            "model: {path: MODEL}\nhttp: {api_keys: {key: {admin: true}}}\n",
            r"http\.api_keys\.\*\*\*\.tenant: Field required",
        ),
        *(
            (
                f"model: {{path: MODEL}}\nhttp: {{api_keys: {{{key}: acme}}}}\n",
                "http.api_keys: .*a key is empty, or has",
            )
            for key in ('""', "schlüssel", "'a key'", r'"a\nkey"')
        ),
        ("http: {}\n", "no model is named"),
        ("- a list\n", "expected sections"),
        ("model: [\n", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, checkpoint: Path, text: str, words: str):
    path = written(tmp_path, text.replace("MODEL", str(checkpoint)))
    with pytest.raises(ConfigError, match=words) as caught:
        OrbitServeConfig.from_yaml(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("owner", ["{admin: true}", "dynamic-library", "{tenant: acme, admn: true}", "7"])
def test_an_error_does_not_say_a_key(tmp_path: Path, checkpoint: Path, owner: str):
    path = written(tmp_path, f"model: {{path: {checkpoint}}}\nhttp: {{api_keys: {{hush-hush: {owner}}}}}\n")
    with pytest.raises(ConfigError, match=r"http\.api_keys\.\*\*\*") as caught:
        OrbitServeConfig.from_yaml(path)
    assert "hush" not in "".join(traceback.format_exception(caught.value)).replace(str(path), "")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml"):
        OrbitServeConfig.from_yaml(tmp_path / "none.yaml")


def test_a_configuration_survives_being_written(tmp_path: Path, checkpoint: Path):
    config = OrbitServeConfig.load(None, {"model.path": checkpoint})
    assert OrbitServeConfig.from_yaml(written(tmp_path, config.to_yaml())) == config


def test_secrets_are_not_written(checkpoint: Path):
    config = OrbitServeConfig.model_validate(
        {
            "model": {"path": checkpoint},
            "library": {"salt_secret": "hush-hush", "storage_options": {"secret": "hush"}},
            "files": {"storage_options": {"secret": "hush"}},
            "precompute": {"storage_options": {"s3": {"secret": "hush"}}},
            "http": {"api_keys": {"hush": "acme"}},
        }
    )
    assert "hush" not in config.to_yaml()
    assert "hush-hush" not in repr(config)


def test_every_setting_is_documented_and_its_default_is_true():
    shown = yaml.safe_load(documented(OrbitServeConfig).replace("<required>", "somewhere"))
    config = OrbitServeConfig.model_validate({"model": {"path": "somewhere"}})

    def compare(shown: dict, settings: BaseModel, where: str) -> None:
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            if isinstance(value, BaseModel):
                compare(shown[name], value, f"{where}{name}.")
                continue
            assert field.description, f"{where}{name} has no description"
            if name not in ("path", "served_name", "salt_secret"):
                assert str(shown[name]) == str(to_jsonable_python(value)), f"{where}{name}"

    compare(shown, config, "")


def test_the_serve_builder_says_what_it_needs():
    with pytest.raises(ValueError, match="config=PATH"):
        build_app({})


def test_the_serve_builder_refuses_tls_that_would_not_be(tmp_path: Path):
    file = tmp_path / "orbitserve.yaml"
    http = {"tls_certificate": "chain.pem", "tls_key": "key.pem"}
    file.write_text(yaml.safe_dump({"model": {"path": str(weights(DEFAULT_MODEL))}, "http": http}))
    with pytest.raises(ConfigError, match=r"http\.tls_certificate.*ssl_certfile.*http_options"):
        build_app({"config": str(file)})


def test_how_far_pairs_are_summed_is_what_was_measured_for_the_model_unless_configured(checkpoint: Path):
    config = OrbitServeConfig.load(None, {"model.path": checkpoint})
    assert config.compose_up_to == COMPOSE_UP_TO, "nothing was measured"
    (checkpoint / FILE).write_text('{"compose_up_to": 1}')
    assert (config.compose_up_to, config.sums_up_to) == (1, 1)
    asked = config.model_copy(update={"prefill": config.prefill.model_copy(update={"compose_up_to": 2})})
    assert asked.compose_up_to == 2
    deep = asked.model_copy(update={"patch": config.patch.model_copy(update={"depth": 0.5})})
    assert deep.sums_up_to == 0


def test_what_weighs_sums_is_what_was_measured_for_the_model_unless_configured(checkpoint: Path):
    config = OrbitServeConfig.load(None, {"model.path": checkpoint})
    assert config.weigh_by is Weighing.KV, "nothing was measured"
    (checkpoint / FILE).write_text('{"compose_up_to": 3}')
    assert config.weigh_by is Weighing.KV, "nothing was measured of that"
    (checkpoint / FILE).write_text('{"compose_up_to": 3, "weigh_by": "attention"}')
    assert config.weigh_by is Weighing.ATTENTION
    asked = config.model_copy(update={"prefill": config.prefill.model_copy(update={"weigh_by": Weighing.KV})})
    assert asked.weigh_by is Weighing.KV


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"compose_up_to": 3, "weigh_by": "guess"}', "weigh_by: .*'kv' or 'attention'"),
        ('{"compose_up_to": -1}', "compose_up_to: .*greater than or equal to 0"),
        ('{"compose_up_to": "3"}', "compose_up_to: .*valid integer"),
        ('{"compose_upto": 3}', "compose_upto: Extra inputs"),
        ("{", "Invalid JSON"),
    ],
)
def test_what_is_wrong_with_a_models_measurements_is_named(checkpoint: Path, text: str, words: str):
    (checkpoint / FILE).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        OrbitServeConfig.load(None, {"model.path": checkpoint})
    assert str(checkpoint / FILE) in str(caught.value)


def test_files_and_requests_have_one_secret(tmp_path: Path, checkpoint: Path):
    def secret(library: str, files: str) -> str:
        sections = (
            f"model: {{path: {checkpoint}}}\nlibrary: {{salt_secret: {library}}}\nfiles: {{salt_secret: {files}}}"
        )
        return OrbitServeConfig.from_yaml(written(tmp_path, sections)).files.salt_secret.get_secret_value()

    assert (secret("a", "''"), secret("''", "a"), secret("a", "a"), secret("''", "''")) == ("a", "a", "a", "")
    with pytest.raises(ConfigError, match=r"library\.salt_secret and files\.salt_secret differ"):
        secret("a", "b")


def test_files_are_reached_as_a_library_behind_a_like_url_is():
    def options(files_url: str, **own: str) -> dict[str, str]:
        library = {"url": "s3://bucket/library", "storage_options": {"key": "library's"}}
        files = {"storage_options": own}
        values = {"model": {"path": "x"}, "library": library, "files": files, "files_url": files_url}
        return OrbitServeConfig.model_validate(values).files.storage_options

    assert options("s3://other/files") == {"key": "library's"}
    assert options("s3://other/files", key="its own") == {"key": "its own"}
    assert options("gs://other/files") == options("files") == {}


def test_what_the_try_out_of_s3_prints_is_a_configuration():
    server = object.__new__(S3Server)
    server._ports = {"proxy": 1234}
    config = OrbitServeConfig.model_validate({"model": {"path": "x"}, **yaml.safe_load(server.configuration("pages"))})
    assert (config.library.url, config.files_url) == ("s3://pages/library", "s3://pages/files")
    assert config.library.storage_options == config.files.storage_options == server.storage_options()


@pytest.mark.parametrize(("cpu", "expected"), [(True, [False, True, False]), (False, [True, True, False])])
def test_prefill_workers_encode_unless_there_is_a_gpu_or_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool, expected: list[bool]
):
    monkeypatch.setattr("serving.settings.is_cpu_build", lambda: cpu)
    sections = ({}, {"vision": {"replicas": 1}}, {"vision": {"replicas": 0}})
    configs = [OrbitServeConfig.model_validate({"model": {"path": tmp_path}, **each}) for each in sections]
    assert [config.has_vision_encoder for config in configs] == expected
    assert f"  replicas: {int(not cpu)}  # As for all roles. 0: prefill workers encode" in documented(VisionSettings, 2)


@pytest.mark.parametrize(
    ("config", "text_only"),
    [
        ('{"architectures": ["LlamaForCausalLM"]}', True),
        ('{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}', False),
        ('{"architectures": ["PageForCausalLM"], "vision_config": {}}', False),
        ('{"architectures": ["ASomethingElse"]}', False),
        ("{}", False),
        ("{", False),
    ],
)
def test_a_text_only_model_never_has_a_vision_encoder(checkpoint: Path, config: str, text_only: bool):
    (checkpoint / "config.json").write_text(config)
    settings = OrbitServeConfig.load(None, {"model.path": checkpoint, "vision.replicas": 1})
    assert (settings.model.is_text_only, settings.has_vision_encoder) == (text_only, not text_only)


@pytest.mark.parametrize(("cpu", "expected"), [(True, (0, 0, 0, 0, 0.5)), (False, (1, 2, 3, 0, 0.5))])
def test_replicas_with_an_engine_get_a_gpu_a_rank_where_vllm_is_built_for_them(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, expected: tuple[float, ...]
):
    monkeypatch.setattr("serving.settings.is_cpu_build", lambda: cpu)
    config = OrbitServeConfig.model_validate(
        {
            "model": {"path": "x"},
            "prefill": {"tensor_parallel_size": 2},
            "decode": {"tensor_parallel_size": 3},
            "patch": {"num_gpus": 0.5},
        }
    )
    roles = (config.vision, config.prefill, config.decode, config.ingress, config.patch)
    assert tuple(role.gpus for role in roles) == expected


@pytest.mark.parametrize(
    ("cpu", "settings", "there"),
    [
        (True, {}, False),
        (False, {}, True),
        (False, {"patch": {"num_gpus": 0}}, False),
        (False, {"patch": {"num_gpus": 0.5}}, False),
        (False, {"patch": {"pool_basis": 8}}, False),
        (False, {"patch": {"basis": "0a"}}, False),
        (False, {"prefill": {"tensor_parallel_size": 2}}, False),
    ],
)
def test_patches_form_on_the_gpu_of_a_prefill_worker_that_holds_whole_kv_unless_told_where_else(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, settings: dict[str, Any], there: bool
):
    monkeypatch.setattr("serving.config.is_cpu_build", lambda: cpu)
    assert OrbitServeConfig.model_validate({"model": {"path": "x"}, **settings}).is_forming_in_prefill is there


def test_a_section_that_is_none_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model: '/data/ckpt' should be settings, such as `path: ...`"):
        OrbitServeConfig.load(written(tmp_path, "model: /data/ckpt"))
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: caf\xe9}")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        OrbitServeConfig.load(tmp_path / "latin.yaml")


def test_a_role_is_pinned_and_spread_by_what_ray_takes(tmp_path: Path):
    file = tmp_path / "orbitserve.yaml"
    place = {"resources": {"fast": 1}, "label_selector": {"zone": "in(a,b)"}, "max_replicas_per_node": 1}
    place["reserved_memory_bytes"] = 4 << 30
    file.write_text(
        yaml.safe_dump({"model": {"path": str(weights(DEFAULT_MODEL))}, "keeper": place, "patch": {"num_cpus": 2}})
    )
    graph = build_app({"config": str(file)})._bound_deployment
    found = graph.init_kwargs["library"]._bound_deployment._replica_config
    assert found.max_replicas_per_node == 1
    assert found.resource_dict["fast"] == 1
    assert found.ray_actor_options["label_selector"] == {"zone": "in(a,b)"}
    assert found.ray_actor_options["memory"] == 4 << 30
    plain = graph.init_kwargs["library"]._bound_deployment.init_args[2]._bound_deployment._replica_config
    assert plain.max_replicas_per_node is None
    assert plain.ray_actor_options.keys().isdisjoint({"resources", "label_selector", "memory"})


def test_a_tiers_room_is_for_as_many_writers_as_the_service_may_have(checkpoint: Path):
    sections = {"model": {"path": checkpoint}, "prefill": {"replicas": {"max": 8}}}
    assert OrbitServeConfig.model_validate(sections).library.writers == 10
    assert OrbitServeConfig.model_validate({"model": {"path": checkpoint}}).library.writers == 4
    assert OrbitServeConfig.model_validate({**sections, "library": {"writers": 20}}).library.writers == 20


def test_pinned_roles_and_nodes_asked_for_have_a_resource_of_the_role(tmp_path: Path):
    file = tmp_path / "orbitserve.yaml"
    file.write_text(
        yaml.safe_dump({"model": {"path": str(weights(DEFAULT_MODEL))}, "keeper": {"resources": {"fast": 1}}})
    )
    graph = build_app({"config": str(file), "pinned": "true"})._bound_deployment
    keeper = graph.init_kwargs["library"]._bound_deployment
    assert keeper._replica_config.ray_actor_options["resources"] == {"fast": 1}
    compiler = keeper.init_args[2]._bound_deployment
    assert compiler._replica_config.ray_actor_options["resources"] == {"orbitserve-patch": 1}
    config = pinned(OrbitServeConfig.from_yaml(file))
    assert planned(config)[Role.PREFILL].bundle.resources["orbitserve-prefill"] == 1
    assert [set(one.resources) - {"CPU"} for one in fixed_bundles(config)] == [
        {"orbitserve-ingress"},
        {"fast"},
        {"orbitserve-patch"},
        {"orbitserve-retriever"},
    ]


@pytest.mark.parametrize(
    ("place", "said"),
    [({"CPU": 2}, "Ray's own"), ({"fast": 0}, "no part of one"), ({"fast": 1.5}, "no whole number")],
)
def test_a_resource_that_ray_would_refuse_later_is_refused_by_name(place: dict[str, float], said: str):
    with pytest.raises(ValueError, match=said):
        VisionSettings(resources=place)


def test_places_are_those_of_the_decode_workers_that_there_are(checkpoint: Path):
    values = {
        "model": {"path": checkpoint},
        "http": {"api_keys": {"a": "one", "b": "two"}},
        "decode": {"replicas": {"min": 1, "max": 8}, "max_num_seqs": 32},
    }
    assert OrbitServeConfig.model_validate(values).places == 32
    assert OrbitServeConfig.model_validate({**values, "autoscale": {"mode": "act"}}).places == 256


def test_an_embedders_folder_is_told_from_the_root(checkpoint: Path):
    values = {"model": {"path": checkpoint}, "retriever": {"embedder": "path:models/e"}}
    found = OrbitServeConfig.model_validate(values)._anchored()
    assert found.retriever.embedder == f"path:{Path('models/e').absolute()}"
