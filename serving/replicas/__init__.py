"""Ray Serve deployments. Importing them sets up gRPC (`serving.replica_grpc`)."""

from serving import replica_grpc

replica_grpc.install()
