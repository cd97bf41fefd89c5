"""Ray Serve deployments, one per role. Their import sets up gRPC in its process (`serving.replica_grpc`)."""

from serving import replica_grpc

replica_grpc.install()
