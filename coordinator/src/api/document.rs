//! The API's description, for tools.

use axum::Json;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::path::{
    HttpMethod, OperationBuilder, ParameterBuilder, ParameterIn, PathItem,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, PathsBuilder,
    Required, ResponseBuilder, SecurityRequirement,
};

/// One operation of the API.
pub(super) struct Described {
    pub(super) path: &'static str,
    pub(super) method: HttpMethod,
    summary: &'static str,
    /// The role it needs; none: no token.
    role: Option<&'static str>,
    /// Media type of the body, if it takes one.
    body: Option<&'static str>,
    /// Name of what it answers, in `compass_shared::api`.
    answer: &'static str,
}

const YAML: Option<&str> = Some("application/yaml");
const JSON: Option<&str> = Some("application/json");
const BYTES: Option<&str> = Some("application/octet-stream");

macro_rules! operations {
    ($($method:ident $path:literal $role:expr, $body:expr, $answer:literal, $summary:literal;)*) => {
        &[$(Described { path: $path, method: HttpMethod::$method, summary: $summary, role: $role, body: $body, answer: $answer }),*]
    };
}

/// Every operation; a test holds it against the router.
pub(super) const OPERATIONS: &[Described] = operations! {
    Get "/healthz" None, None, "Health", "Whether the coordinator works";
    Get "/metrics" Some("viewer"), None, "OpenMetrics text", "What the coordinator counts about itself";
    Get "/v1/nodes" Some("viewer"), None, "array of NodeView", "All nodes that have connected at least once";
    Get "/v1/nodes/{id}" Some("viewer"), None, "NodeView", "One node";
    Delete "/v1/nodes/{id}" Some("admin"), None, "nothing", "Forget a node: its certificate counts no more, its name is free";
    Put "/v1/nodes/{id}/scheduling" Some("operator"), JSON, "NodeView", "Open, cordon or drain a node (SetScheduling)";
    Get "/v1/links" Some("viewer"), None, "array of LinkView", "Links as the planner sees them";
    Get "/v1/queries" Some("viewer"), None, "array of QueryView", "Registered queries, with their SLOs live";
    Post "/v1/queries" Some("app"), YAML, "QueryView", "Register a query";
    Post "/v1/queries/plan" Some("viewer"), YAML, "DryRun", "What a query would get today; changes nothing";
    Get "/v1/queries/{id}" Some("viewer"), None, "QueryView", "One query";
    Delete "/v1/queries/{id}" Some("app"), None, "nothing", "Stop a query";
    Get "/v1/queries/{id}/plans" Some("viewer"), None, "array of PlanView", "Its plans, oldest first";
    Get "/v1/queries/{id}/plans/{generation}/explain" Some("viewer"), None, "Explanation", "Why a plan is as it is";
    Get "/v1/events" Some("viewer"), None, "array of EventView", "The audit log after a number (?after=N&limit=M), else its newest lines";
    Get "/v1/trials" Some("viewer"), None, "Trials", "Stage runs, of one query with ?query=ID";
    Get "/v1/tokens" Some("operator"), None, "array of TokenView", "Tokens without their secrets";
    Post "/v1/tokens" Some("operator"), JSON, "TokenCreated", "Create a token (CreateToken); one for the API needs role admin";
    Delete "/v1/tokens/{id}" Some("admin"), None, "nothing", "Revoke a token";
    Get "/v1/artifacts" Some("viewer"), None, "array of ArtifactView", "Artifacts held here";
    Put "/v1/artifacts/{name}" Some("operator"), BYTES, "ArtifactView", "Push an artifact; x-compass-sha256 may announce its digest";
    Get "/v1/catalogue" Some("viewer"), None, "Catalogue", "Operator kinds";
    Get "/v1/pipelines" Some("viewer"), None, "object of Pipeline", "Named pipelines";
    Get "/v1/openapi.json" Some("viewer"), None, "OpenAPI document", "This description";
};

pub(super) async fn openapi() -> Response {
    Json(document()).into_response()
}

pub(super) fn document() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Compass coordinator")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Answers are the types of compass_shared::api; every error is {error, object, hint}. Times are milliseconds since 1970.",
        ));
    let mut paths = PathsBuilder::new();
    for described in OPERATIONS {
        let item = PathItem::new(described.method.clone(), operation(described));
        paths = paths.path(described.path, item);
    }
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    let components = ComponentsBuilder::new()
        .security_scheme("bearer", SecurityScheme::Http(scheme))
        .build();
    OpenApiBuilder::new()
        .info(info.build())
        .paths(paths.build())
        .components(Some(components))
        .build()
}

fn operation(described: &Described) -> utoipa::openapi::path::Operation {
    let answer = ResponseBuilder::new().description(described.answer).build();
    let refused = ResponseBuilder::new()
        .description("ErrorBody: error, object, hint")
        .build();
    let mut operation = OperationBuilder::new()
        .summary(Some(described.summary))
        .response("2XX", answer)
        .response("default", refused);
    for name in described.path.split(['{', '}']).skip(1).step_by(2) {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Path)
            .required(Required::True);
        operation = operation.parameter(parameter);
    }
    if let Some(media_type) = described.body {
        let body = RequestBodyBuilder::new()
            .content(media_type, ContentBuilder::new().build())
            .required(Some(Required::True));
        operation = operation.request_body(Some(body.build()));
    }
    if let Some(role) = described.role {
        operation = operation
            .security(SecurityRequirement::new("bearer", [role]))
            .description(Some(format!("Needs role {role} or higher.")));
    }
    operation.build()
}
