"""Ray Serve deployments, one per role. Their connections keep alive (`serving.grpc_keepalive`) from the import on."""

from serving import grpc_keepalive

grpc_keepalive.install()
