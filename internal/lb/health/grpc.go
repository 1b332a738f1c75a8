package health

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	grpcProcedure = "/grpc.health.v1.Health/Check"
	// grpcAnswerMax is more than an answer of one number can have.
	grpcAnswerMax = 4 << 10
	// grpcServing is HealthCheckResponse.SERVING.
	grpcServing = 1
)

// grpcStatuses are the other values of HealthCheckResponse.ServingStatus.
var grpcStatuses = map[int32]string{0: "UNKNOWN", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}

// grpcProber asks grpc.health.v1, over HTTP/2 without TLS and a connection of its own.
//
// HealthCheckRequest is a string in field 1, and HealthCheckResponse an enumeration in
// field 1, which is encoded as an int32 is. The wrapper types have the same bytes, so the two
// need no generated code of their own.
type grpcProber struct {
	reach
	client *connect.Client[wrapperspb.StringValue, wrapperspb.Int32Value]
}

func newGRPCProber(t reach) prober {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{
		DialContext:            handOver,
		DisableKeepAlives:      true,
		MaxResponseHeaderBytes: headerMax,
		Protocols:              protocols,
	}}
	return &grpcProber{t, connect.NewClient[wrapperspb.StringValue, wrapperspb.Int32Value](client, "http://"+t.at.String()+grpcProcedure,
		connect.WithGRPC(), connect.WithReadMaxBytes(grpcAnswerMax))}
}

func (p *grpcProber) probe(ctx context.Context) error {
	ctx, conn, err := p.connected(ctx)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is lost
	request := connect.NewRequest(wrapperspb.String(p.health.GRPC.Service))
	request.Header().Set("User-Agent", userAgent)
	answer, err := p.client.CallUnary(ctx, request)
	var refused *connect.Error
	switch code := connect.CodeOf(err); {
	case err == nil:
	case ctx.Err() != nil:
		return cause("grpc answer", ctx.Err(), p.health.Timeout)
	case code == connect.CodeNotFound:
		return fmt.Errorf("grpc: the backend knows no service %q", p.health.GRPC.Service)
	case code == connect.CodeUnimplemented:
		return errors.New("grpc: the backend does not have grpc.health.v1")
	case connect.IsWireError(err) && errors.As(err, &refused):
		return fmt.Errorf("grpc: %s: %s", code, excerpt([]byte(refused.Message())))
	default:
		return cause("grpc", err, p.health.Timeout)
	}
	if status := answer.Msg.GetValue(); status != grpcServing {
		word, known := grpcStatuses[status]
		if !known {
			word = fmt.Sprint(status)
		}
		return fmt.Errorf("grpc status %s, want SERVING", word)
	}
	return nil
}
