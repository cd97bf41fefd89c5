"""Ray Serve deployments. Importing them sets up gRPC (`infra.replica_grpc`)."""

from infra import replica_grpc

replica_grpc.install()
