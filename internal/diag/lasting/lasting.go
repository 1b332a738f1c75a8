// Package lasting ends tools after a time.
package lasting

import (
	"context"
	"time"
)

// For ends the context after the duration; 0: never. Tools call it when their sensors are attached, because that may take
// longer than the duration.
func For(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}
