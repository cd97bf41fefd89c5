"""Settings of the retriever."""

from __future__ import annotations

import re

from pydantic import Field, SecretStr, field_validator

from serving.settings import MIB, RoleSettings

_EMBEDDER = re.compile(r"lexical|static|model|path:.+|http:https?://.+")


class RetrieverSettings(RoleSettings):
    """The retriever: search in vector stores."""

    replicas: int = Field(
        1,
        ge=0,
        description="Replicas of the role, each with all indices in memory. 0: no search; files of vector stores are "
        "completed as soon as they are added.",
    )
    niceness: int = Field(5, ge=0, le=19, description="As for all roles: prompts are computed first.")
    max_ongoing_requests: int = Field(1024, ge=1, description="Calls in progress on a replica before Serve queues.")
    embedder: str = Field(
        "static",
        description="lexical: words alone (BM25). static: text by a table of token vectors, which comes with the "
        "package. model: images by the served model's vision tower, which each replica loads (on a GPU give the role a "
        "share, `num_gpus`); words find them where the tower writes words (`aligned_words` in orbitserve.json beside "
        "the weights). path:DIR: a model in a directory that every host of the role has, in the layout of "
        "sentence-transformers (text), CLIP or SigLIP (text and images). http:URL: a server's `URL/embeddings`, as "
        "OpenAI and vLLM have it. With another one all files are indexed again beside the old records.",
    )
    embedder_model: str = Field("", description="Model that is asked for at `http:URL`.")
    embedder_key: SecretStr = Field(SecretStr(""), description="Bearer key for `http:URL`.")
    embedder_images: bool = Field(False, description="Whether the model at `http:URL` embeds images.")
    query_prompt: str = Field(
        "", description="Text before every query for `http:URL` and `path:DIR`, such as E5's 'query: '."
    )
    document_prompt: str = Field("", description="Text before every document for `http:URL` and `path:DIR`.")
    embed_timeout_s: float = Field(
        2.0,
        gt=0,
        description="Time in which a query must be embedded; then it is searched by words alone, and says so.",
    )
    follow_period_s: float = Field(
        5.0, gt=0, description="Seconds between looks for files that came into vector stores, or left, unannounced."
    )
    indexing: int = Field(2, ge=1, description="Files that a replica indexes at once; further ones wait.")
    max_parts: int = Field(
        1_000_000, ge=1, description="Pages and passages of all vector stores; files beyond that fail."
    )
    max_vector_bytes: int = Field(
        4096 * MIB,
        ge=1,
        description="Memory of all vectors in a replica, 3 bytes a number; files beyond that fail. Every vector is "
        "compared with a query, and a page has hundreds of them with some embedders.",
    )

    @property
    def has_model(self) -> bool:
        """True if the embedder is the served model."""
        return self.embedder == "model"

    @field_validator("embedder")
    @classmethod
    def _known(cls, embedder: str) -> str:
        if not _EMBEDDER.fullmatch(embedder):
            raise ValueError(
                "an embedder is lexical, static, model, path: and a directory, or http: and a URL, such as "
                "http:http://host:8000/v1"
            )
        return embedder
