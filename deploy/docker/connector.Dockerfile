# The connector, for containers that run an image of vLLM as it is: copies itself into the folder that it is given, a
# volume that vLLM's container has in its PYTHONPATH. From the root of a clone:
# docker build -f deploy/docker/connector.Dockerfile -t backhaul-connector:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt ./
COPY services/node-agent/connector services/node-agent/connector
# In the environment, so that it binds what builds the package, too.
ENV PIP_CONSTRAINT=/src/constraints.txt
# What it needs vLLM has; and vLLM's Python is another one.
RUN pip install --no-cache-dir --no-compile --no-deps --target /connector ./services/node-agent/connector

FROM busybox:1.36
COPY --from=build /connector /connector
USER 2000:2000
ENTRYPOINT ["cp", "-r", "/connector/."]
CMD ["/opt/backhaul-connector"]
